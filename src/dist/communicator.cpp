// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/dist/communicator.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/check.hpp"
#include "dist/backend_communicator.hpp"
#include "dist/nccl.hpp"

namespace qlorapp {
namespace {

class SingleProcess final : public Communicator {
 public:
  SingleProcess() : Communicator(0, 1) {}
  Exchange all_reduce(const at::Tensor&) override { return {}; }
  Exchange all_gather_into(const at::Tensor& all, const at::Tensor& mine) override {
    all.view({-1}).copy_(mine.view({-1}));
    return {};
  }
  Exchange reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    mine.view({-1}).copy_(all.view({-1}));
    return {};
  }
  Exchange broadcast(const at::Tensor&, int64_t) override { return {}; }
  void barrier() override {}
  std::vector<std::string> gather(const std::string& text) override { return {text}; }
  std::shared_ptr<Communicator> among(const std::vector<int64_t>&) override { return single_process(); }
};

class PlannedRanks final : public Communicator {
 public:
  explicit PlannedRanks(int64_t size) : Communicator(0, size) {}
  Exchange all_reduce(const at::Tensor&) override { return {}; }
  Exchange all_gather_into(const at::Tensor&, const at::Tensor&) override { return {}; }
  Exchange reduce_scatter(const at::Tensor&, const at::Tensor&) override { return {}; }
  Exchange broadcast(const at::Tensor&, int64_t) override { return {}; }
  void barrier() override {}
  std::vector<std::string> gather(const std::string& text) override {
    return std::vector<std::string>(static_cast<size_t>(size()), text);
  }
  std::shared_ptr<Communicator> among(const std::vector<int64_t>& members) override { return planned_ranks(std::ssize(members)); }
};

c10::intrusive_ptr<c10d::Store> store_of(const Launch& launch, std::chrono::seconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.port);
  options.isServer = launch.rank == 0 && !launch.store_is_there;
  options.waitWorkers = false;  // the first exchange waits, and names the ranks that are missing
  options.timeout = timeout;
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(launch.address, options);
  } catch (const std::exception& error) {
    throw IoError(message("[ranks] rank {} of {} cannot reach the store at {}:{} (MASTER_ADDR, MASTER_PORT){}. {}", launch.rank,
                          launch.size, launch.address, launch.port,
                          options.isServer ? ", which it has to open: is the port in use?" : ": rank 0 or its launcher is missing",
                          first_line(error)),
                  ECONNREFUSED);
  }
  return c10::make_intrusive<c10d::PrefixStore>("qlorapp/" + launch.attempt, store);
}

std::string name_of_node() {
  char name[256] = {};
  (void)gethostname(name, sizeof name - 1);
  std::string result = name;
  for (const char* variable : {"GROUP_RANK", "SLURM_NODEID"}) {
    if (const char* const number = std::getenv(variable)) result += message(" {}={}", variable, number);
  }
  return result;
}

}  // namespace

Communicator::~Communicator() = default;
void Communicator::report_failure(const std::string&) {}
void report_failure_of(Communicator& ranks, const std::exception& error) { ranks.report_failure(first_line(error)); }

std::shared_ptr<Communicator> single_process() { return std::make_shared<SingleProcess>(); }
std::shared_ptr<Communicator> planned_ranks(int64_t size) { return std::make_shared<PlannedRanks>(size); }

std::shared_ptr<Communicator> communicator_of(const Launch& launch, at::Device device, std::chrono::seconds timeout) {
  if (launch.size == 1) return single_process();
  const bool keeps_store = launch.rank == 0 && !launch.store_is_there;
  const auto store = store_of(launch, timeout);
  const auto texts = c10::make_intrusive<c10d::PrefixStore>("texts", store);
  std::shared_ptr<Communicator> ranks;
  if (device.is_cuda()) {
    auto place = std::make_unique<MeetingPlace>(texts, launch.rank, launch.size, timeout);
    (void)place->exchange({});  // before NCCL, which cannot say who is missing
    const auto nccl = nccl_backend(*place, launch.rank);
    ranks = communicator_over(nccl, device, std::move(place), keeps_store ? Leaving::kAsLast : Leaving::kTells);
  } else {
    ranks = communicator_over(texts, launch.rank, launch.size, timeout, keeps_store);
    ranks->barrier();
  }
  return ranks;
}

std::shared_ptr<Communicator> ranks_of_node(const std::shared_ptr<Communicator>& ranks) {
  const std::vector<std::string> nodes = ranks->gather(name_of_node());
  for (size_t rank = 0; rank < nodes.size(); ++rank) {  // the same on all ranks
    QLORAPP_CHECK_VALUE(
        std::count(nodes.begin(), nodes.end(), nodes[rank]) > 1,
        "[ranks] base_sharding=node divides the base over the processes of a machine; rank {} is alone on its own. Use full, "
        "or leave the option out.",
        static_cast<int64_t>(rank));
  }
  std::vector<int64_t> members;
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    if (nodes[rank] == nodes[static_cast<size_t>(ranks->rank())]) members.push_back(static_cast<int64_t>(rank));
  }
  if (std::ssize(members) == ranks->size()) return ranks;
  std::shared_ptr<Communicator> result = ranks->among(members);
  result->whole_ = ranks;
  return result;
}

std::vector<int64_t> sum_over(Communicator& ranks, std::vector<int64_t> values) {
  if (ranks.size() == 1) return values;
  std::string text(values.size() * sizeof(int64_t), '\0');
  std::memcpy(text.data(), values.data(), text.size());
  std::fill(values.begin(), values.end(), int64_t{0});
  for (const std::string& each : ranks.gather(text)) {
    QLORAPP_CHECK_VALUE(each.size() == text.size(),
                        "[ranks] all ranks must make the same exchanges; got {} bytes here and {} on another rank.", text.size(),
                        each.size());
    for (size_t i = 0; i < values.size(); ++i) {
      int64_t value = 0;
      std::memcpy(&value, each.data() + i * sizeof value, sizeof value);
      values[i] += value;
    }
  }
  return values;
}

bool any_of(Communicator& ranks, bool value) { return sum_over(ranks, {value ? 1 : 0}).front() > 0; }

std::string text_of_first(Communicator& ranks, const std::string& text) { return ranks.gather(text).front(); }

void check_same_on_all(Communicator& ranks, const std::string& what, const std::string& value) {
  std::map<std::string, std::vector<int64_t>> ranks_of;
  const std::vector<std::string> all = ranks.gather(value);
  for (size_t rank = 0; rank < all.size(); ++rank) ranks_of[all[rank]].push_back(static_cast<int64_t>(rank));
  if (ranks_of.size() == 1) return;
  std::string found;
  for (const auto& [text, who] : ranks_of)
    found += message("{}{} on {} {}", found.empty() ? "" : "; ", text, who.size() == 1 ? "rank" : "ranks", joined(who));
  throw ValueError(message(
      "[ranks] all ranks must have the same {}; got {}. Start every rank with the same command, files and version.", what, found));
}

}  // namespace qlorapp
