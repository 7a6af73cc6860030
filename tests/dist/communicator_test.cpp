// SPDX-License-Identifier: Apache-2.0
// Ranks meet: what launchers say, what is exchanged, and who is missing.
#include "qlorapp/dist/communicator.hpp"

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "dist/in_ranks.hpp"
#include "format/expect_error.hpp"
#include "qlorapp/core/error.hpp"

using namespace qlorapp;

namespace {

Launch launched(const std::map<std::string, std::string>& variables) {
  return launch_of([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

/// The tests' assertions are not made on other threads.
class Findings {
 public:
  void add(bool right) {
    const std::lock_guard lock(mutex_);
    ++count_;
    all_ = all_ && right;
  }
  [[nodiscard]] bool all(int count) const { return all_ && count_ == count; }

 private:
  std::mutex mutex_;
  bool all_ = true;
  int count_ = 0;
};

std::string why(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) { return known.what(); }
}

}  // namespace

TEST_CASE("each launcher's variables give rank, size and place", "[dist][cpu]") {
  REQUIRE(launched({}).size == 1);
  REQUIRE(launched({{"WORLD_SIZE", "1"}}).launcher.empty());
  const std::map<std::string, std::string> torchrun{{"WORLD_SIZE", "4"},
                                                    {"RANK", "3"},
                                                    {"LOCAL_RANK", "1"},
                                                    {"MASTER_ADDR", "node7"},
                                                    {"MASTER_PORT", "4711"},
                                                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                    {"TORCHELASTIC_RESTART_COUNT", "2"}};
  Launch found = launched(torchrun);
  REQUIRE((found.rank == 3 && found.size == 4 && found.local_rank == 1 && found.launcher == "torchrun"));
  REQUIRE((found.address == "node7" && found.port == 4711 && found.store_is_there && found.attempt == "2"));
  found = launched({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "1"}, {"SLURM_STEP_NUM_NODES", "1"}});
  REQUIRE((found.rank == 1 && found.launcher == "Slurm" && found.address == "127.0.0.1" && !found.store_is_there));
  found = launched({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  REQUIRE((found.rank == 0 && found.launcher == "MPI" && found.port == 29500));
  // A shell that Slurm has opened is no rank: only srun starts several.
  REQUIRE(launched({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}).size == 1);

  const auto without = [&](const std::string& name, const std::string& value) {
    auto variables = torchrun;
    variables.erase(name);
    if (!value.empty()) variables[name] = value;
    return thrown<ValueError>([&] { (void)launched(variables); });
  };
  for (const char* name : {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    INFO(name);
    REQUIRE(has(without(name, ""), name));
  }
  REQUIRE(has(without("RANK", "4"), "RANK must be a number from 0 to 3; got '4'"));
  REQUIRE(has(without("WORLD_SIZE", "two"), "WORLD_SIZE must be a number from 1 to 65536; got 'two'"));
  REQUIRE(has(thrown<ValueError>([&] {
                (void)launched(
                    {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_NUM_NODES", "2"}});
              }),
              "MASTER_ADDR"));
}

TEST_CASE("every exchange gives each rank what the others have", "[dist][cpu]") {
  for (const int64_t size : {1, 2, 4}) {
    Findings findings;
    on_ranks(size, [&](Communicator& ranks) {
      const auto mine = static_cast<double>(ranks.rank());
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kDouble}) {
        const at::Tensor values = at::full({3, 2}, mine + 1, dtype);
        ranks.all_reduce(values).wait();
        findings.add(at::equal(values, at::full({3, 2}, static_cast<double>(size * (size + 1)) / 2, dtype)));
      }
      const at::Tensor all = at::empty({size * 2}), part = at::empty({2});
      ranks.all_gather_into(all, at::full({2}, mine)).wait();
      findings.add(at::equal(all, at::arange(size).repeat_interleave(2).to(at::kFloat)));
      ranks.reduce_scatter(part, all).wait();
      findings.add(at::equal(part, at::full({2}, mine * static_cast<double>(size))));
      const at::Tensor sent = at::full({5}, mine, at::kInt);
      ranks.broadcast(sent, size - 1).wait();
      findings.add(at::equal(sent, at::full({5}, size - 1, at::kInt)));
      const std::vector<std::string> texts = ranks.gather(std::string(static_cast<size_t>(ranks.rank()), 'x'));
      findings.add(static_cast<int64_t>(texts.size()) == size && texts.back().size() == static_cast<size_t>(size - 1));
      findings.add(sum_over(ranks, {1, ranks.rank()}) == std::vector<int64_t>{size, size * (size - 1) / 2});
      findings.add(any_of(ranks, ranks.rank() == size - 1) && !any_of(ranks, false));
      ranks.barrier();
    });
    REQUIRE(findings.all(static_cast<int>(size) * 10));
  }
}

TEST_CASE("a tensor of many megabytes is summed, and nothing of past exchanges stays in the store", "[dist][cpu]") {
  Findings findings;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto ranks = communicator_over(store, rank, 2, std::chrono::seconds{20});
      const at::Tensor values = at::arange(5 << 19, at::kFloat);  // 10 MiB
      for (int i = 0; i < 5; ++i) ranks->all_reduce(values).wait();
      findings.add(at::equal(values, at::arange(5 << 19, at::kFloat) * 32));
      ranks->barrier();
      ranks->barrier();
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(findings.all(2));
  REQUIRE(store->getNumKeys() <= 6);
}

TEST_CASE("a rank that does not come is named by all that wait for it", "[dist][cpu]") {
  const auto errors = in_ranks(
      3,
      [](Communicator& ranks) {
        if (ranks.rank() != 1) ranks.barrier();
      },
      std::chrono::milliseconds{1500});
  REQUIRE_FALSE(errors[1]);
  for (const size_t rank : {0, 2}) {
    REQUIRE(has(why(errors[rank]), "rank [1], which did not come to the start of the run"));
    REQUIRE(has(why(errors[rank]), "Raise ddp_timeout"));
  }
}

TEST_CASE("a rank that fails ends the others at once, with its message", "[dist][cpu]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = in_ranks(3, [](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 2) return ranks.report_failure("the disk is full");
    ranks.barrier();
  });
  for (const size_t rank : {0, 1}) REQUIRE(why(errors[rank]) == "rank 2: the disk is full");
  REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds{10});
}

TEST_CASE("what differs between ranks is named on each with its values", "[dist][cpu]") {
  const auto errors = in_ranks(3, [](Communicator& ranks) {
    check_same_on_all(ranks, "color", "red");
    check_same_on_all(ranks, "size", ranks.rank() == 1 ? "7" : "8");
  });
  for (const auto& error : errors) REQUIRE(has(why(error), "the same size; got 7 on rank [1]; 8 on ranks [0, 2]"));
}
