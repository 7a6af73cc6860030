// SPDX-License-Identifier: Apache-2.0
#include "dist/backend_communicator.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/check.hpp"
#include "dist/nccl.hpp"
#include "dist/stall_watch.hpp"

namespace qlorapp {
namespace {

class BackendCommunicator final : public Communicator {
 public:
  BackendCommunicator(c10::intrusive_ptr<c10d::Backend> backend, at::Device device, std::unique_ptr<MeetingPlace> place,
                      Leaving leaving)
      : Communicator(backend->getRank(), backend->getSize()),
        backend_(std::move(backend)),
        device_(device),
        place_(std::move(place)),
        leaving_(leaving) {
    if (place_) watch_.emplace(*place_, rank(), device, [this](const std::string& why) { end(why); });
  }
  ~BackendCommunicator() override {
    release();
    if (place_ && leaving_ != Leaving::kNever) place_->leave(leaving_ == Leaving::kAsLast);
  }
  void set_timeout(std::chrono::seconds timeout) override {
    if (!backend_) return;
    try {
      backend_->setTimeout(timeout);
    } catch (const std::exception&) {}  // a backend that has none
    if (place_) place_->set_timeout(timeout);
    if (watch_) watch_->set_timeout(timeout);
    if (whole()) whole()->set_timeout(timeout);
  }
  void close() override {
    release();
    {
      const std::lock_guard lock(mutex_);
      ended_ = "[ranks] this process has left the others: it makes no more exchanges.";
    }
    if (whole()) whole()->close();
  }

  Exchange all_reduce(const at::Tensor& values) override {
    std::vector<at::Tensor> list{values};
    return begun([&] { return backend_->allreduce(list); });
  }
  Exchange all_gather_into(const at::Tensor& all, const at::Tensor& mine) override {
    at::Tensor out = all, in = mine;
    return begun([&] { return backend_->_allgather_base(out, in); });
  }
  Exchange reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    at::Tensor out = mine, in = all;
    return begun([&] { return backend_->_reduce_scatter_base(out, in); });
  }
  Exchange broadcast(const at::Tensor& values, int64_t from) override {
    std::vector<at::Tensor> list{values};
    c10d::BroadcastOptions options;
    options.rootRank = from;
    return begun([&] { return backend_->broadcast(list, options); });
  }
  void barrier() override {
    if (place_) {
      (void)exchanged({});
      return;
    }
    const at::Tensor one = at::ones({1}, at::TensorOptions().dtype(at::kLong).device(device_));
    all_reduce(one).wait();
    (void)one.item<int64_t>();
  }

  std::vector<std::string> gather(const std::string& text) override {
    std::vector<std::string> result;
    if (place_) {
      for (const auto& each : exchanged({text.begin(), text.end()})) result.emplace_back(each.begin(), each.end());
      return result;
    }
    const auto options = at::TensorOptions().dtype(at::kLong).device(device_);
    const at::Tensor sizes = at::empty({size()}, options);
    all_gather_into(sizes, at::full({1}, std::ssize(text), options)).wait();
    const at::Tensor counts = sizes.cpu();
    const auto longest = counts.max().item<int64_t>();
    at::Tensor mine = at::zeros({longest}, at::kByte);
    if (!text.empty()) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
    const at::Tensor all = at::empty({size() * longest}, options.dtype(at::kByte));
    if (longest > 0) all_gather_into(all, mine.to(device_)).wait();
    const at::Tensor bytes = all.cpu();
    for (int64_t i = 0; i < size(); ++i) {
      const auto* data = static_cast<const char*>(bytes.const_data_ptr());
      result.emplace_back(data + i * longest, static_cast<size_t>(counts[i].item<int64_t>()));
    }
    return result;
  }

  void report_failure(const std::string& why) override {
    if (place_) place_->report_failure(message("rank {}: {}", place_->number(), why));
  }

  std::shared_ptr<Communicator> among(const std::vector<int64_t>& members) override {
    QLORAPP_CHECK_VALUE(place_ != nullptr,
                        "[ranks] base_sharding=node needs a process group with a store (torch.distributed.init_process_group makes "
                        "one); this one has none. Use base_sharding=full.");
    const int64_t mine = std::find(members.begin(), members.end(), rank()) - members.begin();
    if (!device_.is_cuda()) return communicator_at(MeetingPlace(*place_, members), mine, /*keeps_store=*/false);
    auto place = std::make_unique<MeetingPlace>(*place_, members);
    const auto backend = nccl_backend(*place, mine);
    return communicator_over(backend, device_, std::move(place), Leaving::kNever);
  }

 private:
  /// How long the message of a rank that ends is waited for.
  static constexpr std::chrono::seconds kPatience{3};

  Exchange begun(const std::function<c10::intrusive_ptr<c10d::Work>()>& begin) {
    c10::intrusive_ptr<c10d::Work> work;
    if (watch_) watch_->count();
    blocking([&] { work = begin(); }, /*is_on_stream=*/false);  // a backend may meet the others first
    return Exchange([this, work] { blocking([&] { work->wait(); }, device_.is_cuda()); });
  }

  void blocking(const std::function<void()>& call, bool is_on_stream) {
    guarded([&] { watch_ ? watch_->during(call, is_on_stream) : call(); });
  }

  /// Shuts a backend of its own down. Not while an error is thrown: shutting down may wait for the other ranks.
  void release() {
    watch_.reset();
    const bool is_own = leaving_ != Leaving::kNever || (whole() && device_.is_cuda());
    if (is_own && backend_ && ended_.empty() && std::uncaught_exceptions() == 0) {
      try {
        backend_->shutdown();             // or torch warns of what it does itself
      } catch (const std::exception&) {}  // another rank is gone already
    }
    backend_.reset();
  }

  std::vector<std::vector<uint8_t>> exchanged(const std::vector<uint8_t>& mine) {
    refuse_after_end();
    return place_->exchange(mine);
  }

  void guarded(const std::function<void()>& work) {
    refuse_after_end();
    try {
      work();
    } catch (const Error&) { throw; } catch (const std::exception& error) {  // of c10, or Gloo's own
      refuse_after_end();
      const std::string why = place_ ? place_->failure(kPatience) : std::string();
      throw IoError(
          why.empty()
              ? message("[ranks] an exchange with the other ranks failed: {} A rank has ended or hangs: look at its output.",
                        first_line(error))
              : why,
          ECONNRESET);
    }
  }

  /// Called by the watch. Results on the devices are invalid from here on; the next exchange throws.
  void end(const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      ended_ = why;
    }
    backend_->abort();  // NCCL's kernels end, and with them what waits for them
  }

  void refuse_after_end() {
    const std::lock_guard lock(mutex_);
    if (!ended_.empty()) throw IoError(ended_, ETIMEDOUT);
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  at::Device device_;
  std::unique_ptr<MeetingPlace> place_;
  Leaving leaving_;
  std::mutex mutex_;
  std::string ended_;  ///< Why the watch has ended the exchanges.
  std::optional<StallWatch> watch_;
};

/// How long the group's exchanges may take.
std::chrono::milliseconds timeout_of(c10d::Backend& backend) {
  constexpr std::chrono::minutes kTorchsDefault{30};
  try {
    return backend.getBackendOptions()->timeout;
  } catch (const c10::Error&) { return kTorchsDefault; }  // a backend without options
}

/// Each communicator over a group has keys of its own: every rank makes the same ones, in the same order.
int64_t number_of_next(const std::string& group) {
  static std::mutex mutex;
  static std::map<std::string, int64_t> made;
  const std::lock_guard lock(mutex);
  return made[group]++;
}

}  // namespace

std::shared_ptr<Communicator> communicator_over(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                                                std::unique_ptr<MeetingPlace> place, Leaving leaving) {
  return std::make_shared<BackendCommunicator>(std::move(backend), device, std::move(place), leaving);
}

std::shared_ptr<Communicator> communicator_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device) {
  QLORAPP_CHECK_VALUE(group.defined(), "[ranks] a process group must be given; got none.");
  const auto backend = group->getBackend(device.type());
  std::unique_ptr<MeetingPlace> place;
  if (const auto store = group->getStore()) {
    const std::string name = message("qlorapp/{}/{}", group->getGroupName(), number_of_next(group->getGroupName()));
    place = std::make_unique<MeetingPlace>(c10::make_intrusive<c10d::PrefixStore>(name, store), backend->getRank(),
                                           backend->getSize(), timeout_of(*backend));
  }
  return communicator_over(backend, device, std::move(place), Leaving::kNever);
}

std::shared_ptr<Communicator> communicator_over(const std::string& group_name, at::Device device) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(group_name);
  } catch (const c10::Error& error) {
    throw ValueError(
        message("[ranks] a process group must exist; got the name '{}'. Call torch.distributed.init_process_group first, and pass "
                "its group_name. {}",
                group_name, first_line(error)));
  }
  return communicator_over(group, device);
}

}  // namespace qlorapp
