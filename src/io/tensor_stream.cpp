// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_stream.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "format/read_ahead.hpp"
#include "io/tensor_file.hpp"

namespace qlorapp {
namespace {

using format::ReadAhead;

at::Tensor flat_bytes(const at::Tensor& tensor) { return tensor.flatten().view(at::kByte); }

at::TensorOptions element_options(const StreamedTensor& tensor, at::Device device) {
  return at::TensorOptions().dtype(scalar_type_of(tensor.from.tensor->dtype, tensor.from.tensor->name)).device(device);
}

/// Where each tensor stands, and who is told.
class Arrivals {
 public:
  Arrivals(std::vector<StreamedTensor> tensors, at::Device device) : tensors_(std::move(tensors)) {
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const StreamedTensor& a, const StreamedTensor& b) {
      return std::pair(a.from.file, a.from.tensor->offset) < std::pair(b.from.file, b.from.tensor->offset);
    });
    for (StreamedTensor& tensor : tensors_) {
      const int64_t bytes = tensor.from.tensor->nbytes;
      const bool is_there = tensor.to.defined() && (tensor.to.device() == device || tensor.to.is_cpu());
      QLORAPP_CHECK_VALUE(
          !tensor.to.defined() || (is_there && tensor.to.is_contiguous() && static_cast<int64_t>(tensor.to.nbytes()) == bytes),
          "[load] the destination of '{}' must be contiguous, on {} or the host and of {} bytes.", tensor.from.tensor->name,
          device.str(), bytes);
      missing_.push_back(bytes);
      if (bytes > 0) continue;
      if (tensor.take) tensor.take(0, at::empty({0}, element_options(tensor, device)));
      if (tensor.done) tensor.done();
    }
  }

  [[nodiscard]] std::vector<format::TensorLocation> locations() const {
    std::vector<format::TensorLocation> locations;
    for (const StreamedTensor& tensor : tensors_) locations.push_back(tensor.from);
    return locations;
  }

  [[nodiscard]] const StreamedTensor& operator[](size_t tensor) const { return tensors_[tensor]; }

  /// A piece of a tensor is there: in its place, or in `bytes` (uint8). Thread-safe.
  void arrived(size_t index, int64_t offset, int64_t nbytes, const at::Tensor& bytes) {
    StreamedTensor& tensor = tensors_[index];
    if (!tensor.to.defined()) {
      const at::Tensor elements = bytes.view(scalar_type_of(tensor.from.tensor->dtype, tensor.from.tensor->name));
      tensor.take(offset / static_cast<int64_t>(elements.element_size()), elements);
    }
    const std::lock_guard lock(mutex_);
    if ((missing_[index] -= nbytes) > 0) return;
    if (tensor.done) tensor.done();
    tensor = {};  // with what its functions hold
  }

 private:
  std::vector<StreamedTensor> tensors_;
  std::mutex mutex_;              ///< One `done` at a time.
  std::vector<int64_t> missing_;  ///< Bytes.
};

/// Each thread reads a piece and does with it what is to be done while it is in the cache.
void stream_on_cpu(Arrivals& arrivals, const StreamBuffers& buffers) {
  struct Piece {
    size_t tensor;
    int64_t offset, nbytes;
  };
  const std::vector<format::TensorLocation> locations = arrivals.locations();
  std::vector<Piece> pieces;
  for (size_t i = 0; i < locations.size(); ++i) {
    const int64_t total = locations[i].tensor->nbytes;
    for (int64_t offset = 0; offset < total; offset += buffers.buffer_bytes) {
      pieces.push_back({i, offset, std::min(buffers.buffer_bytes, total - offset)});
    }
  }
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&](const at::Tensor& buffer) {
    for (size_t i = next++; i < pieces.size() && !failed; i = next++) {
      const Piece& piece = pieces[i];
      const at::Tensor& to = arrivals[piece.tensor].to;
      const at::Tensor bytes =
          to.defined() ? flat_bytes(to).narrow(0, piece.offset, piece.nbytes) : buffer.narrow(0, 0, piece.nbytes);
      format::read_piece(locations[piece.tensor], piece.offset, bytes_of(bytes));
      arrivals.arrived(piece.tensor, piece.offset, piece.nbytes, bytes);
    }
  };
  // What threads allocate is seen by who looks at this one (memory/measured_memory.hpp, torch's profiler).
  const at::ThreadLocalState state;
  // One parallel region: operators inside it run on their thread alone, and no team of threads spins between pieces while
  // readers need the cores.
  at::parallel_for(0, std::min<int64_t>(buffers.threads, std::ssize(pieces)), 1, [&](int64_t, int64_t) {
    const at::ThreadLocalStateGuard same(state);
    const at::NoGradGuard no_grad;
    try {
      work(at::empty({buffers.buffer_bytes}, at::TensorOptions().dtype(at::kByte)));
    } catch (...) {
      failed = true;
      throw;
    }
  });
  format::check_unchanged(locations);
}

std::vector<at::Tensor> make_ring(std::span<const format::TensorLocation> tensors, const StreamBuffers& buffers) {
  const size_t useful = ReadAhead::useful_buffers(tensors, static_cast<size_t>(buffers.buffer_bytes));
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  std::vector<at::Tensor> ring;
  // One by one, as torch rounds pinned memory up to powers of two.
  for (size_t i = 0; i < std::clamp<size_t>(useful, 1, static_cast<size_t>(buffers.count)); ++i) {
    ring.push_back(at::empty({buffers.buffer_bytes}, options));
  }
  return ring;
}

std::vector<std::span<std::byte>> memory_of(const std::vector<at::Tensor>& ring) {
  std::vector<std::span<std::byte>> memory;
  for (const at::Tensor& buffer : ring) memory.push_back(bytes_of(buffer));
  return memory;
}

/// The device's side of a ring of pinned buffers. One batch behind: while the host waits for what becomes of a batch (a check
/// for NaN), the copies of the next are under way.
class DeviceSide {
 public:
  DeviceSide(Arrivals& arrivals, ReadAhead& reader, const std::vector<at::Tensor>& ring, at::Device device)
      : arrivals_(arrivals),
        reader_(reader),
        ring_(ring),
        compute_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)),
        copies_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
        forked_(device.type()) {
    for (at::Tensor& staging : staging_)
      staging = at::empty(ring.front().sizes(), at::TensorOptions().dtype(at::kByte).device(device));
    for (size_t i = 0; i < staging_.size(); ++i) landed_.emplace_back(device.type());
    for (size_t i = 0; i < ring.size(); ++i) copied_.emplace_back(device.type());
  }
  ~DeviceSide() {
    try {
      copies_.synchronize();  // nobody may free a buffer under a copy
    } catch (const std::exception&) {
      // The device is lost, and says so again at its next use.
    }
  }
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  void run() {
    std::optional<ReadAhead::Batch> before;
    size_t turn = 0;
    while (const auto batch = next()) {
      copy(*batch, turn % 2);
      if (before) use(*before, (turn + 1) % 2);
      before = batch;
      ++turn;
    }
    if (before) use(*before, (turn + 1) % 2);
    copies_.synchronize();
  }

 private:
  /// Gives buffers back as their copies end, and waits for that rather than for the readers if these have none left.
  std::optional<ReadAhead::Batch> next() {
    while (!under_way_.empty() && (copied_[under_way_.front()].query() || !reader_.ready())) {
      copied_[under_way_.front()].synchronize();
      reader_.release(under_way_.front());
      under_way_.pop_front();
    }
    return reader_.next();
  }

  void copy(const ReadAhead::Batch& batch, size_t turn) {
    forked_.record(compute_);  // memory that is written to now may have been somebody else's until here
    forked_.block(copies_);
    {
      const c10::StreamGuard guard(copies_);
      for (const ReadAhead::Piece& piece : batch.pieces) {
        const StreamedTensor& tensor = arrivals_[piece.tensor];
        const int64_t at = static_cast<int64_t>(piece.at);
        const at::Tensor to = tensor.to.defined() ? flat_bytes(tensor.to).narrow(0, piece.offset, piece.nbytes)
                                                  : staging_[turn].narrow(0, at, piece.nbytes);
        to.copy_(ring_[batch.buffer].narrow(0, at, piece.nbytes), /*non_blocking=*/true);
      }
    }
    landed_[turn].record(copies_);
    copied_[batch.buffer].record(copies_);
    under_way_.push_back(batch.buffer);
  }

  void use(const ReadAhead::Batch& batch, size_t turn) {
    landed_[turn].block(compute_);
    for (const ReadAhead::Piece& piece : batch.pieces) {
      arrivals_.arrived(piece.tensor, piece.offset, piece.nbytes,
                        staging_[turn].narrow(0, static_cast<int64_t>(piece.at), piece.nbytes));
    }
  }

  Arrivals& arrivals_;
  ReadAhead& reader_;
  const std::vector<at::Tensor>& ring_;
  c10::Stream compute_, copies_;
  c10::Event forked_;
  std::array<at::Tensor, 2> staging_;
  std::vector<c10::Event> landed_;  ///< Of each staging buffer.
  std::vector<c10::Event> copied_;  ///< Of each buffer of the ring.
  std::deque<size_t> under_way_;    ///< Buffers that copies read, oldest first.
};

}  // namespace

void stream_tensors(std::vector<StreamedTensor> tensors, at::Device device) {
  stream_tensors(std::move(tensors), device, StreamBuffers::of(device.type(), at::get_num_threads()));
}

void stream_tensors(std::vector<StreamedTensor> tensors, at::Device device, const StreamBuffers& buffers) {
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(device);
  Arrivals arrivals(std::move(tensors), device);
  if (device.is_cpu()) return stream_on_cpu(arrivals, buffers);
  std::vector<format::TensorLocation> locations = arrivals.locations();
  const std::vector<at::Tensor> ring = make_ring(locations, buffers);
  ReadAhead reader(std::move(locations), memory_of(ring), buffers.threads);
  DeviceSide(arrivals, reader, ring, device).run();
}

}  // namespace qlorapp
