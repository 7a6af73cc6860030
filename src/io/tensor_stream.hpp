// SPDX-License-Identifier: Apache-2.0
/// Many tensors from files to a device, in pieces, so that reading, copying and computing go on at the same time.
///
///     on a GPU   reading threads     pread → a ring of pinned buffers in host memory (format/read_ahead.hpp)
///                copy stream         buffer → the tensor's place, or → one of two staging buffers
///                current stream      what becomes of the piece: quantized, converted
///     on a CPU   every thread        pread → a buffer of its own that stays in the cache → what becomes of the piece
///
/// Beyond the tensors themselves a GPU holds two staging buffers and what `take` takes; the host holds the ring, or a buffer a
/// thread. Which tensors come in which order is the files' order, not the caller's.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "format/tensor_files.hpp"
#include "quant/arrival.hpp"

namespace qlorapp {

struct StreamedTensor {
  format::TensorLocation from;
  /// Where the file's bytes go as they are: contiguous, of their number, on the stream's device. Undefined if `take` has them.
  at::Tensor to;
  /// Gets the tensor piece by piece: flat elements in the file's dtype on the device, those from `first` on. They stand in a
  /// buffer that is used again: valid for what is done with them in the current stream during the call.
  std::function<void(int64_t first, const at::Tensor& piece)> take;
  /// All of it is there for the current stream. One call at a time, on a CPU from any thread. May be empty.
  std::function<void()> done;
};

[[nodiscard]] inline StreamedTensor streamed(const format::TensorLocation& from, Arrival arrival) {
  return {from, std::move(arrival.to), std::move(arrival.take), std::move(arrival.done)};
}

/// Returns when all is there. On a GPU other streams than the current one have to wait for that as for any work of it.
/// @throws FormatError, IoError as format::ReadAhead::next, and what `take` and `done` throw; then all threads have ended and
///         no copy is under way any more.
void stream_tensors(std::vector<StreamedTensor> tensors, at::Device device);
void stream_tensors(std::vector<StreamedTensor> tensors, at::Device device, const StreamBuffers& buffers);

}  // namespace qlorapp
