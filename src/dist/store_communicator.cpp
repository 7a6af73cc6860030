// SPDX-License-Identifier: Apache-2.0
#include "dist/store_communicator.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/check.hpp"
#include "qlorapp/dist/communicator.hpp"

namespace qlorapp {
namespace {

using Bytes8 = std::vector<uint8_t>;

/// A value of TCPStore has at most 8 MiB.
constexpr size_t kPart = size_t{4} << 20;
/// Between two looks of a rank that waits: from the first, twice as long each time. (Store::wait() writes a warning whenever it ends
/// without the key.)
constexpr std::chrono::microseconds kFirstLook{20}, kLongestLook{10'000};

}  // namespace

MeetingPlace::MeetingPlace(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::chrono::milliseconds timeout)
    : store_(std::move(store)), numbers_(static_cast<size_t>(size)), rank_(rank), size_(size), timeout_(timeout) {
  std::iota(numbers_.begin(), numbers_.end(), int64_t{0});
}

MeetingPlace::MeetingPlace(const MeetingPlace& whole, std::vector<int64_t> members)
    : store_(whole.store_),
      prefix_(message("{}among {}/", whole.prefix_, members.front())),
      numbers_(std::move(members)),
      rank_(std::find(numbers_.begin(), numbers_.end(), whole.rank_) - numbers_.begin()),
      size_(std::ssize(numbers_)),
      timeout_(whole.timeout_) {}

template <class Call>
auto MeetingPlace::ask(const Call& call) {
  try {
    return call();
  } catch (const c10::DistStoreError&) {
    throw;  // a time-out
  } catch (const c10::Error& error) {
    is_gone_ = true;
    throw IoError(message("[ranks] rank 0, or the launcher that keeps the store of the ranks, has ended: look at its output. {}",
                          first_line(error)),
                  ECONNRESET);
  }
}

std::string MeetingPlace::key(int64_t round, int64_t rank, int64_t part) const {
  return message("{}{}/{}/{}", prefix_, round, rank, part);
}

void MeetingPlace::refuse_after_failure() const {
  if (failed_.empty()) return;
  throw IoError(
      message("[ranks] these ranks have failed before, and their exchanges are out of step: {} Start the processes again.",
              failed_),
      ECONNABORTED);
}

std::vector<Bytes8> MeetingPlace::exchange(const Bytes8& mine) {
  refuse_after_failure();
  const int64_t round = round_++;
  // The first part begins with the number of parts.
  const auto parts = static_cast<int64_t>(std::max<size_t>(1, (mine.size() + kPart - 1) / kPart));
  for (int64_t part = parts; part-- > 0;) {
    const size_t begin = static_cast<size_t>(part) * kPart, end = std::min(mine.size(), begin + kPart);
    Bytes8 value;
    if (part == 0)
      value.insert(value.end(), reinterpret_cast<const uint8_t*>(&parts), reinterpret_cast<const uint8_t*>(&parts + 1));
    value.insert(value.end(), mine.begin() + static_cast<std::ptrdiff_t>(begin), mine.begin() + static_cast<std::ptrdiff_t>(end));
    ask([&] { store_->set(key(round, rank_, part), value); });
  }
  const auto end = std::chrono::steady_clock::now() + timeout_;
  std::vector<Bytes8> all;
  for (int64_t rank = 0; rank < size_; ++rank) all.push_back(rank == rank_ ? mine : read(round, rank, end));
  // Each other rank has come to this round, so it has read what was left in the one before.
  for (int64_t part = 0; round > 0 && part < parts_before_; ++part) ask([&] { store_->deleteKey(key(round - 1, rank_, part)); });
  parts_before_ = parts;
  return all;
}

Bytes8 MeetingPlace::read(int64_t round, int64_t rank, std::chrono::steady_clock::time_point end) {
  Bytes8 result;
  int64_t parts = 1;
  for (int64_t part = 0; part < parts; ++part) {
    const std::string name = key(round, rank, part);
    wait_for(name, round, end);
    const Bytes8 value = ask([&] { return store_->get(name); });
    size_t begin = 0;
    if (part == 0) {
      QLORAPP_CHECK_VALUE(value.size() >= sizeof parts, "[ranks] rank {} left {} bytes in exchange {}; expected at least {}.", rank,
                          value.size(), round, sizeof parts);
      std::memcpy(&parts, value.data(), sizeof parts);
      begin = sizeof parts;
    }
    result.insert(result.end(), value.begin() + static_cast<std::ptrdiff_t>(begin), value.end());
  }
  return result;
}

void MeetingPlace::wait_for(const std::string& key, int64_t round, std::chrono::steady_clock::time_point end) {
  for (auto pause = kFirstLook; !ask([&] { return store_->check({key}); }); pause = std::min(2 * pause, kLongestLook)) {
    if (ask([&] { return store_->check({kFailure}); })) {
      const Bytes8 why = ask([&] { return store_->get(kFailure); });
      failed_.assign(why.begin(), why.end());
      throw IoError(failed_, ECONNABORTED);
    }
    if (std::chrono::steady_clock::now() >= end) give_up(round);
    std::this_thread::sleep_for(pause);
  }
}

void MeetingPlace::give_up(int64_t round) {
  std::vector<int64_t> missing;
  for (int64_t rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !ask([&] { return store_->check({key(round, rank, 0)}); }))
      missing.push_back(numbers_[static_cast<size_t>(rank)]);
  }
  const std::string why = message(
      "[ranks] rank {} waited {} s for {} {}, which did not come{}. A rank has ended or hangs: look at its output. Raise "
      "ddp_timeout if it is only slow.",
      number(), timeout_.count() / 1000, missing.size() == 1 ? "rank" : "ranks", missing.empty() ? "the others" : joined(missing),
      round == 0 ? " to the start of the run" : "");
  report_failure(why);
  throw IoError(why, ETIMEDOUT);
}

void MeetingPlace::leave(bool last) noexcept {
  constexpr std::chrono::seconds kLongest{20}, kAfterFailure{5};  // of a rank that is dead there is nothing to wait for
  if (is_gone_) return;
  try {
    store_->set(message("{}left/{}", prefix_, rank_), Bytes8{1});
    const auto longest = store_->check({kFailure}) ? kAfterFailure : kLongest;
    const auto end = std::chrono::steady_clock::now() + std::min<std::chrono::milliseconds>(timeout_, longest);
    for (int64_t rank = 0; last && rank < size_; ++rank) {
      while (!store_->check({message("{}left/{}", prefix_, rank)})) {
        if (std::chrono::steady_clock::now() > end) return;
        std::this_thread::sleep_for(std::chrono::milliseconds{10});
      }
    }
  } catch (...) {}  // the others are gone already
}

std::string MeetingPlace::failure(std::chrono::milliseconds patience) const noexcept {
  try {
    const auto end = std::chrono::steady_clock::now() + patience;
    while (!store_->check({kFailure})) {
      if (std::chrono::steady_clock::now() >= end) return {};
      std::this_thread::sleep_for(kLongestLook);
    }
    const Bytes8 why = store_->get(kFailure);
    return {why.begin(), why.end()};
  } catch (const std::exception&) { return {}; }  // the store is gone
}

void MeetingPlace::report_failure(const std::string& why) {
  if (failed_.empty()) failed_ = why;
  if (is_gone_) return;
  try {
    (void)store_->compareSet(kFailure, Bytes8(), Bytes8(why.begin(), why.end()));  // the first stands
  } catch (const c10::Error&) {}  // the store is gone with rank 0, and so is everyone who could read it
}

namespace {

class StoreCommunicator final : public Communicator {
 public:
  StoreCommunicator(int64_t rank, int64_t size, MeetingPlace place, bool keeps_store)
      : Communicator(rank, size), place_(std::move(place)), keeps_store_(keeps_store) {}
  ~StoreCommunicator() override { place_.leave(keeps_store_); }

  Exchange all_reduce(const at::Tensor& values) override {
    values.copy_(sum(values));
    return {};
  }
  Exchange all_gather_into(const at::Tensor& all, const at::Tensor& mine) override {
    all.view({-1}).copy_(at::cat(tensors(mine)));
    return {};
  }
  Exchange reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    mine.view({-1}).copy_(sum(all).view({size(), -1})[rank()]);
    return {};
  }
  Exchange broadcast(const at::Tensor& values, int64_t from) override {
    const auto all = place_.exchange(rank() == from ? bytes(values) : std::vector<uint8_t>());
    if (rank() != from) values.copy_(tensor(all[static_cast<size_t>(from)], values).view(values.sizes()));
    return {};
  }
  void barrier() override { (void)place_.exchange({}); }
  std::vector<std::string> gather(const std::string& text) override {
    std::vector<std::string> result;
    for (const auto& each : place_.exchange({text.begin(), text.end()})) result.emplace_back(each.begin(), each.end());
    return result;
  }
  void report_failure(const std::string& why) override { place_.report_failure(message("rank {}: {}", place_.number(), why)); }
  void set_timeout(std::chrono::seconds timeout) override {
    place_.set_timeout(timeout);
    if (whole()) whole()->set_timeout(timeout);
  }
  std::shared_ptr<Communicator> among(const std::vector<int64_t>& members) override {
    const int64_t mine = std::find(members.begin(), members.end(), rank()) - members.begin();
    return communicator_at(MeetingPlace(place_, members), mine, /*keeps_store=*/false);
  }
  void close() override {
    if (whole()) whole()->close();
  }

 private:
  static std::vector<uint8_t> bytes(const at::Tensor& values) {
    const at::Tensor here = values.cpu().contiguous();
    const auto* data = static_cast<const uint8_t*>(here.const_data_ptr());
    return {data, data + here.nbytes()};
  }
  static at::Tensor tensor(const std::vector<uint8_t>& data, const at::Tensor& like) {
    QLORAPP_CHECK_VALUE(data.size() == like.nbytes(),
                        "[ranks] a tensor must have the same size on all ranks; got {} bytes here and {} on another. Give all "
                        "ranks the same options.",
                        like.nbytes(), data.size());
    at::Tensor result = at::empty({like.numel()}, like.options().device(at::kCPU));
    if (!data.empty()) std::memcpy(result.mutable_data_ptr(), data.data(), data.size());
    return result;
  }
  std::vector<at::Tensor> tensors(const at::Tensor& mine) {
    std::vector<at::Tensor> result;
    for (const auto& each : place_.exchange(bytes(mine))) result.push_back(tensor(each, mine));
    return result;
  }
  at::Tensor sum(const at::Tensor& mine) {
    const std::vector<at::Tensor> all = tensors(mine);
    at::Tensor result = all.front().clone();
    for (size_t i = 1; i < all.size(); ++i) result.add_(all[i]);
    return result.view(mine.sizes());
  }

  MeetingPlace place_;
  bool keeps_store_;
};

}  // namespace

std::shared_ptr<Communicator> communicator_at(MeetingPlace place, int64_t rank, bool keeps_store) {
  const auto size = static_cast<int64_t>(place.numbers().size());
  return std::make_shared<StoreCommunicator>(rank, size, std::move(place), keeps_store);
}

std::shared_ptr<Communicator> communicator_over(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
                                                std::chrono::milliseconds timeout, bool keeps_store) {
  QLORAPP_CHECK_VALUE(rank >= 0 && rank < size, "[ranks] a rank must be from 0 to {}; got {}.", size - 1, rank);
  return communicator_at(MeetingPlace(store, rank, size, timeout), rank, keeps_store);
}

}  // namespace qlorapp
