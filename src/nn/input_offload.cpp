// SPDX-License-Identifier: Apache-2.0
#include "nn/input_offload.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "core/check.hpp"

namespace qlorapp {
namespace {

c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

c10::Stream new_stream(at::Device device) {
  QLORAPP_CHECK_VALUE(!device.is_cpu(), "[input_on_host] inputs on a CPU are in host memory already.");
  if (device.is_meta()) return current_stream(device);  // planning: nothing is copied
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

/// A host tensor that a plan counts; it is neither read nor written.
at::Tensor no_memory(int64_t bytes) {
  static uint8_t nothing = 0;
  return at::from_blob(&nothing, {bytes}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

PinnedRing::PinnedRing(at::Device device)
    : device_(device), copies_(new_stream(device)), forked_(device.type()), copied_(device.type()) {}

Bytes PinnedRing::nbytes() const {
  const std::lock_guard lock(mutex_);
  return Bytes{bytes_};
}

int64_t PinnedRing::allocations() const {
  const std::lock_guard lock(mutex_);
  return allocations_;
}

at::Tensor PinnedRing::acquire(at::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  const auto wanted = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(bytes, 1))));
  at::Tensor slot;
  {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->numel() >= wanted && (best == free_.end() || it->numel() < best->numel())) best = it;
    }
    if (best == free_.end() && !free_.empty()) {  // all are too small: one makes room for its successor
      bytes_ -= free_.back().numel();
      free_.pop_back();
    } else if (best != free_.end()) {
      slot = std::move(*best);
      free_.erase(best);
    }
    if (!slot.defined()) {
      slot = device_.is_meta() ? no_memory(wanted) : at::empty({wanted}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
      bytes_ += wanted;
      ++allocations_;
    }
  }
  void* const memory = slot.mutable_data_ptr();
  return at::from_blob(
      memory, sizes, [ring = shared_from_this(), slot = std::move(slot)](void*) { ring->release(slot); },
      at::TensorOptions().dtype(dtype));
}

void PinnedRing::release(at::Tensor slot) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(slot));
}

void PinnedRing::copy(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream) {
  if (device_.is_meta()) return;
  const std::lock_guard lock(mutex_);
  forked_.record(stream);
  forked_.block(copies_);
  {
    const c10::StreamGuard guard(copies_);
    to.copy_(from, /*non_blocking=*/true);
  }
  copied_.record(copies_);
}

void PinnedRing::join(const c10::Stream& stream) {
  if (device_.is_meta()) return;
  const std::lock_guard lock(mutex_);
  copied_.block(stream);  // of the latest copy; those before it are done then, too
}

InputOffload::InputOffload(std::shared_ptr<PinnedRing> ring) : ring_(std::move(ring)) {}

InputOffload::Copy::Copy(InputOffload& offload, at::Tensor x, int64_t block)
    : offload_(offload),
      x_(x.detach()),
      host_(offload.ring_->acquire(x.sizes(), x.scalar_type())),
      stream_(current_stream(x.device())) {
  offload_.ring_->copy(host_, x_, stream_);
  offload_.waiting_.insert_or_assign(block, WeakTensor(host_.getIntrusivePtr()));
}

InputOffload::Copy::~Copy() {
  try {
    offload_.ring_->join(stream_);
  } catch (const std::exception&) {
    // The device is lost, and says so again at its next use.
  }
}

InputOffload::~InputOffload() {
  try {
    drop_prefetched();
  } catch (const std::exception&) {
    // As above.
  }
}

InputOffload::Loading InputOffload::begin_load(const at::Tensor& host) {
  const c10::Stream stream = current_stream(ring_->device());
  Loading loading{host, at::empty(host.sizes(), host.options().device(ring_->device()).pinned_memory(false)), stream};
  ring_->copy(loading.x, host, stream);  // begins when the memory's last user in this stream is done
  return loading;
}

at::Tensor InputOffload::load(const at::Tensor& host, int64_t block) {
  const at::NoGradGuard no_grad;
  const c10::Stream stream = current_stream(ring_->device());
  if (prefetched_ && (!prefetched_->host.is_same(host) || prefetched_->stream != stream)) drop_prefetched();
  Loading loading = prefetched_ ? *std::exchange(prefetched_, std::nullopt) : begin_load(host);
  ring_->join(stream);
  waiting_.insert_or_assign(block, WeakTensor(host.getIntrusivePtr()));  // for another backward pass over the same graph
  return loading.x;
}

void InputOffload::prefetch(int64_t block) {
  const auto found = waiting_.find(block);
  if (found == waiting_.end()) return;
  auto alive = found->second.lock();
  if (!alive) return;
  const at::NoGradGuard no_grad;
  drop_prefetched();
  prefetched_ = begin_load(at::Tensor(std::move(alive)));
}

void InputOffload::drop_prefetched() {
  if (!prefetched_) return;
  ring_->join(prefetched_->stream);
  prefetched_.reset();
}

}  // namespace qlorapp
