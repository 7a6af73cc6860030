// SPDX-License-Identifier: Apache-2.0
/// Steps of a checkpoint's tensor on its way to memory. io/tensor_stream.hpp brings its bytes, and
/// memory/planner.hpp its shape alone. So a plan of loading is made by the code that loads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

struct Arrival {
  /// Where the tensor's bytes go as they are. Undefined if `take` has them.
  at::Tensor to;
  /// Gets the tensor piece by piece: flat elements in the checkpoint's dtype, those from `first` on, in a buffer that is used again.
  std::function<void(int64_t first, const at::Tensor& piece)> take;
  /// All of it is there. May be empty.
  std::function<void()> done;
};

/// Into `place`, of any dtype and shape; with pieces that are converted or cross to another device, if it cannot be as it is.
/// @param stored  dtype in the checkpoint.  @param device  on which pieces arrive.
[[nodiscard]] Arrival arrive_dense(const at::Tensor& place, at::ScalarType stored, at::Device device);

/// Quantized as it comes (piece_quantizer.hpp); `done` gets the result.
/// @throws FormatError from take and done, with `name` in front of what the quantizer has to complain about.
[[nodiscard]] Arrival arrive_quantized(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType stored,
                                       const Quantizer& quantizer, std::function<void(QuantizedTensor)> done);

/// Memory for one tensor of a weight, not filled.
using PlaceMaker = std::function<at::Tensor(at::IntArrayRef shape, at::ScalarType dtype)>;
[[nodiscard]] PlaceMaker places_on(at::Device device);

/// Places for a weight that is quantized already.
/// @param dtype  of the weight before.
[[nodiscard]] QuantizedTensor empty_quantized(const std::vector<int64_t>& shape, at::ScalarType dtype,
                                              const Quantizer::Options& options, const PlaceMaker& place);
[[nodiscard]] QuantizedTensor empty_quantized(const std::vector<int64_t>& shape, at::ScalarType dtype,
                                              const Quantizer::Options& options, at::Device device);

/// The buffers that tensors come through. Measured with benchmarks/load_cuda.py; docs/performance.md.
struct StreamBuffers {
  int threads;           ///< That read; on a CPU no more than torch's.
  int64_t count;         ///< Of buffers; on a CPU one a thread.
  int64_t buffer_bytes;  ///< Each, and the largest piece; a multiple of format::ReadAhead::kBufferStep.

  /// On a CPU 1 MiB for each of torch's threads, for a GPU up to 8 threads and 24 × 8 MiB of pinned host memory.
  [[nodiscard]] static StreamBuffers of(at::DeviceType type, int torch_threads);
  /// Of the device's own memory: a CPU's are all of it, a GPU has two, in turn.
  [[nodiscard]] int64_t on_device(at::DeviceType type) const { return type == at::kCPU ? count : 2; }
};

}  // namespace qlorapp
