// SPDX-License-Identifier: Apache-2.0
#include "nn/weight_stream.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "ops/memory_tape.hpp"

namespace qlorapp {
namespace {

int64_t version_of(const at::Tensor& bytes) { return bytes.is_inference() ? 0 : static_cast<int64_t>(bytes._version()); }

}  // namespace

WeightStream::WeightStream(at::Device device, std::vector<Source> blocks, std::shared_ptr<Communicator> ranks)
    : device_(device), sources_(std::move(blocks)), ranks_(std::move(ranks)) {
  const at::NoGradGuard no_grad;
  const int64_t shards = ranks_ ? ranks_->size() : 1;
  int64_t longest = 0;
  for (const Source& source : sources_) longest = std::max(longest, shards * source.bytes.numel());
  const ops::MemoryUseScope use(ops::MemoryUse::kCodes);
  for (Place& place : places_) place.bytes = at::empty({longest}, at::TensorOptions().dtype(at::kByte).device(device_));
  if (device_.is_cpu() || device_.is_meta()) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  copies_ = guard.getStreamFromGlobalPool(device_);
  forked_.emplace(device_.type());
  for (Place& place : places_) place.arrived.emplace(device_.type());
}

WeightStream::~WeightStream() {
  try {
    if (copies_)
      copies_->synchronize();  // the memory of a copy must not be freed under it (c10d keeps that of an exchange itself),
    if (computation_)
      computation_->synchronize();  // nor that of a kernel: the places belong to another stream than the caller's last
  } catch (const std::exception&) {
    // The device is lost, and says so again at its next use.
  }
}

Bytes WeightStream::device_bytes() const {
  return Bytes{static_cast<int64_t>(places_[0].bytes.nbytes() + places_[1].bytes.nbytes())};
}

bool WeightStream::holds(const Place& place, int64_t block) const {
  return place.block == block && place.version == version_of(sources_[static_cast<size_t>(block)].bytes);
}

int64_t WeightStream::after(int64_t block, int64_t before, bool training) const {
  if (before == block + 1) return block - 1;
  const bool is_last = block + 1 == std::ssize(sources_);
  if (!is_last) return block + 1;
  return training ? -1 : 0;
}

void WeightStream::load(Place& place, int64_t block) {
  const Source& source = sources_[static_cast<size_t>(block)];
  if (place.block < 0 || sources_[static_cast<size_t>(place.block)].forms != source.forms)
    place.weights = views_of(place.bytes, source.forms);
  place.block = -1;  // until all of it is on its way
  const int64_t version = version_of(source.bytes);
  if (copies_) {
    forked_->record(*computation_);  // begins when the place's last reader is done
    forked_->block(*copies_);
    const c10::StreamGuard guard(*copies_);
    fill(place, source.bytes);
    place.arrived->record(*copies_);
  } else if (!device_.is_meta()) {
    place.exchange.wait();  // of a prefetch that nothing has asked for
    fill(place, source.bytes);
  }
  place.block = block;
  place.version = version;
  ++copied_;
}

void WeightStream::fill(Place& place, const at::Tensor& bytes) {
  if (ranks_) {
    place.exchange = ranks_->all_gather_into(place.bytes.narrow(0, 0, ranks_->size() * bytes.numel()), bytes);
  } else {
    place.bytes.narrow(0, 0, bytes.numel()).copy_(bytes, /*non_blocking=*/copies_.has_value());
  }
}

/// The current stream waits.
void WeightStream::wait_for(Place& place) {
  place.exchange.wait();
  if (copies_) place.arrived->block(*computation_);
}

const BlockWeights& WeightStream::at(int64_t block, bool training) {
  const at::NoGradGuard no_grad;
  bool must_wait = false;
  if (copies_) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    if (computation_ && *computation_ != stream) {  // one after the other: a copy waits for the latest stream only
      forked_->record(*computation_);
      forked_->block(stream);
      must_wait = true;
    }
    computation_ = stream;
  }
  if (!holds(places_[current_], block)) {
    const int64_t before = places_[current_].block;
    current_ = 1 - current_;
    if (!holds(places_[current_], block)) load(places_[current_], block);
    wait_for(places_[current_]);
    Place& other = places_[1 - current_];
    const int64_t next = after(block, before, training);
    if (next >= 0 && next != block && !holds(other, next)) load(other, next);
  } else if (must_wait) {
    wait_for(places_[current_]);
  }
  return places_[current_].weights;
}

}  // namespace qlorapp
