// SPDX-License-Identifier: Apache-2.0
#include "dist/backend_communicator.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/check.hpp"

namespace qlorapp {
namespace {

Exchange exchange_of(const c10::intrusive_ptr<c10d::Work>& work) {
  return Exchange([work] {
    try {
      work->wait();
    } catch (const c10::Error& error) {
      throw IoError(message("[ranks] an exchange with the other ranks failed: {} A rank has ended or hangs: look at its output.",
                            first_line(error)),
                    ECONNRESET);
    }
  });
}

class BackendCommunicator final : public Communicator {
 public:
  BackendCommunicator(c10::intrusive_ptr<c10d::Backend> backend, at::Device device, std::unique_ptr<MeetingPlace> place,
                      bool keeps_store)
      : Communicator(backend->getRank(), backend->getSize()),
        backend_(std::move(backend)),
        device_(device),
        place_(std::move(place)),
        keeps_store_(keeps_store) {}
  ~BackendCommunicator() override {
    if (place_) place_->leave(keeps_store_);
  }

  Exchange all_reduce(const at::Tensor& values) override {
    std::vector<at::Tensor> list{values};
    return exchange_of(backend_->allreduce(list));
  }
  Exchange all_gather_into(const at::Tensor& all, const at::Tensor& mine) override {
    at::Tensor out = all, in = mine;
    return exchange_of(backend_->_allgather_base(out, in));
  }
  Exchange reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    at::Tensor out = mine, in = all;
    return exchange_of(backend_->_reduce_scatter_base(out, in));
  }
  Exchange broadcast(const at::Tensor& values, int64_t from) override {
    std::vector<at::Tensor> list{values};
    c10d::BroadcastOptions options;
    options.rootRank = from;
    return exchange_of(backend_->broadcast(list, options));
  }
  void barrier() override {
    if (place_) {
      (void)place_->exchange({});
      return;
    }
    const at::Tensor one = at::ones({1}, at::TensorOptions().dtype(at::kLong).device(device_));
    all_reduce(one).wait();
    (void)one.item<int64_t>();
  }

  std::vector<std::string> gather(const std::string& text) override {
    std::vector<std::string> result;
    if (place_) {
      for (const auto& each : place_->exchange({text.begin(), text.end()})) result.emplace_back(each.begin(), each.end());
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
    if (place_) place_->report_failure(message("rank {}: {}", rank(), why));
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  at::Device device_;
  std::unique_ptr<MeetingPlace> place_;
  bool keeps_store_;
};

}  // namespace

std::shared_ptr<Communicator> communicator_over(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                                                std::unique_ptr<MeetingPlace> place, bool keeps_store) {
  return std::make_shared<BackendCommunicator>(std::move(backend), device, std::move(place), keeps_store);
}

std::shared_ptr<Communicator> communicator_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device) {
  QLORAPP_CHECK_VALUE(group.defined(), "[ranks] a process group must be given; got none.");
  return communicator_over(group->getBackend(device.type()), device, nullptr, false);
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
