// SPDX-License-Identifier: Apache-2.0
#include "train/paged_state.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/check.hpp"

namespace qlorapp {
namespace {

using c10::impl::VirtualGuardImpl;

c10::Stream current_stream(at::Device device) { return VirtualGuardImpl(device.type()).getStream(device); }

/// Below this, state is moved to the host. The size of a request is not known beforehand; a step's largest is the logits of one chunk.
Bytes little_room(const ops::DeviceRoom& room) {
  using namespace literals;
  return std::min(Bytes{room.total.count / 8}, 2_GiB);
}

}  // namespace

/// Holds the right to read or move the moments. A mutex would deadlock: the thread that steps is asked for relief itself when it
/// allocates.
class PagedState::Busy {
 public:
  explicit Busy(PagedState& state, bool wait = true) : state_(state) {
    while (state_.busy_.exchange(true, std::memory_order_acquire)) {
      if (!wait) return;
      std::this_thread::yield();  // the holder moves memory and never waits for us
    }
    mine_ = true;
  }
  ~Busy() {
    if (mine_) state_.busy_.store(false, std::memory_order_release);
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  explicit operator bool() const { return mine_; }

 private:
  PagedState& state_;
  bool mine_ = false;
};

PagedState::PagedState(std::vector<at::Tensor> moments, int64_t elements)
    : device_(moments.front().device()),
      elements_(elements),
      moments_(std::move(moments)),
      allocated_on_(current_stream(device_)),
      used_on_(allocated_on_),
      last_use_(device_.type()) {
  for (const at::Tensor& moment : moments_) {
    QLORAPP_CHECK_VALUE(!moment.is_cpu() && moment.device() == device_ && moment.dim() == 1 && elements % moment.numel() == 0 &&
                            kChunk % (elements / moment.numel()) == 0,
                        "[paged_state] moments must be flat, on one GPU, and of sizes that divide {}; got {} on {}.", elements,
                        joined(moment.sizes()), moment.device().str());
    bytes_ += Bytes{static_cast<int64_t>(moment.nbytes())};
  }
  ops::add_memory_relief(this);
}

PagedState::~PagedState() { ops::remove_memory_relief(this); }

void PagedState::follow_current_stream() {
  const c10::Stream stream = current_stream(device_);
  if (stream == used_on_) return;
  last_use_.record(used_on_);
  last_use_.block(stream);
  used_on_ = stream;
}

bool PagedState::held_elsewhere() const {
  return std::any_of(moments_.begin(), moments_.end(),
                     [](const at::Tensor& moment) { return moment.use_count() > 1 || moment.storage().use_count() > 1; });
}

void PagedState::to_host() {
  const c10::StreamGuard guard(used_on_);
  std::vector<at::Tensor> hosted;
  for (const at::Tensor& moment : moments_) {
    hosted.push_back(at::empty(moment.sizes(), moment.options().device(at::kCPU).pinned_memory(true)));
    hosted.back().copy_(moment, /*non_blocking=*/true);
  }
  if (used_on_ != allocated_on_) {
    for (const at::Tensor& moment : moments_)
      VirtualGuardImpl(device_.type()).recordDataPtrOnStream(moment.storage().data_ptr(), used_on_);
  }
  moments_ = std::move(hosted);  // frees the device's
  on_host_ = true;
}

void PagedState::to_device() {
  std::vector<at::Tensor> there;  // all or none: the device may be too full after all
  for (const at::Tensor& moment : moments_)
    there.push_back(at::empty(moment.sizes(), moment.options().device(device_).pinned_memory(false)));
  for (size_t i = 0; i < there.size(); ++i) there[i].copy_(moments_[i], /*non_blocking=*/true);
  moments_ = std::move(there);
  allocated_on_ = used_on_;
  on_host_ = false;
}

void PagedState::step(const Update& update) {
  const at::NoGradGuard no_grad;
  const Busy busy(*this);
  follow_current_stream();
  if (on_host_ && !held_elsewhere()) {
    const auto room = ops::device_room(device_);
    try {
      if (room && room->free - bytes_ >= little_room(*room) * 2) to_device();
    } catch (const c10::OutOfMemoryError&) {
      // Another thread allocated first: they stay.
    }
  }
  if (!on_host_) return update(moments_, 0, elements_);
  // All memory before the first write: an update that fails for want of it has changed nothing.
  std::vector<at::Tensor> staging;
  for (const at::Tensor& moment : moments_) {
    const int64_t share = elements_ / moment.numel();
    staging.push_back(at::empty({std::min(kChunk, elements_) / share}, moment.options().device(device_).pinned_memory(false)));
  }
  for (int64_t begin = 0; begin < elements_; begin += kChunk) {
    const int64_t count = std::min(kChunk, elements_ - begin);
    std::vector<at::Tensor> hosted, there;
    for (size_t i = 0; i < moments_.size(); ++i) {
      const int64_t share = elements_ / moments_[i].numel();
      hosted.push_back(moments_[i].narrow(0, begin / share, count / share));
      there.push_back(staging[i].narrow(0, 0, count / share));
      there.back().copy_(hosted.back(), /*non_blocking=*/true);
    }
    update(there, begin, count);
    for (size_t i = 0; i < there.size(); ++i) hosted[i].copy_(there[i], /*non_blocking=*/true);
  }
}

std::vector<at::Tensor> PagedState::tensors() {
  const Busy busy(*this);
  if (on_host_) VirtualGuardImpl(device_.type()).synchronizeStream(used_on_);
  return moments_;
}

bool PagedState::move_to_host() {
  const at::NoGradGuard no_grad;
  const Busy busy(*this);
  if (on_host_ || held_elsewhere()) return false;
  to_host();
  return true;
}

bool PagedState::move_to_device() {
  const at::NoGradGuard no_grad;
  const Busy busy(*this);
  if (!on_host_ || held_elsewhere()) return false;
  follow_current_stream();
  to_device();
  return true;
}

bool PagedState::relieve(at::Device device, const ops::DeviceRoom& room) noexcept {
  if (device != device_ || on_host_ || room.free >= little_room(room)) return false;
  const Busy busy(*this, /*wait=*/false);
  if (!busy || on_host_ || held_elsewhere()) return false;
  try {
    const at::NoGradGuard no_grad;
    to_host();
    return true;
  } catch (const std::exception&) {
    return false;  // no pinned memory to be had: they stay
  }
}

}  // namespace qlorapp
