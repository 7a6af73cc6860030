// SPDX-License-Identifier: Apache-2.0
/// The ranks of a run: processes that train one model together, each with its own device and its own copy of the adapters.
///
///     const auto ranks = communicator_of(launch_of_environment(), device);  // torchrun, accelerate, srun, mpirun; or one process
///     ranks->all_reduce(model.arena().gradients()).wait();
///
/// Every rank makes the same calls in the same order. Tensors are dense, contiguous and of the same shape and dtype on all ranks.
/// The engine is torch's c10d: NCCL between GPUs, any process group that a program or a script has, and between CPUs of a C++ program
/// its TCPStore (torch's packages have no headers of Gloo).
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace qlorapp {

/// An exchange that was begun. Dropping it does not end it. Its communicator must live until wait() returns.
class Exchange {
 public:
  Exchange() = default;  ///< One that is over.
  explicit Exchange(std::function<void()> wait) : wait_(std::move(wait)) {}

  /// On a GPU the current stream waits, and the host does not; on a CPU the call returns when the result is there.
  void wait() {
    if (const auto wait = std::exchange(wait_, nullptr)) wait();
  }

 private:
  std::function<void()> wait_;
};

class Communicator {
 public:
  static constexpr std::chrono::seconds kDefaultTimeout{60};

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator();

  [[nodiscard]] int64_t rank() const { return rank_; }
  [[nodiscard]] int64_t size() const { return size_; }
  /// Rank 0 writes files and log lines.
  [[nodiscard]] bool is_first() const { return rank_ == 0; }

  /// Sums `values` over the ranks, in place.
  virtual Exchange all_reduce(const at::Tensor& values) = 0;
  /// @param all  size() times the elements of `mine`, which end up there in the order of the ranks.
  virtual Exchange all_gather_into(const at::Tensor& all, const at::Tensor& mine) = 0;
  /// @param mine  gets this rank's part of the sum of `all`, which is size() parts.
  virtual Exchange reduce_scatter(const at::Tensor& mine, const at::Tensor& all) = 0;
  /// Copies `values` of rank `from` to all.
  virtual Exchange broadcast(const at::Tensor& values, int64_t from) = 0;
  /// Returns when every rank has called it. Synchronizes.
  virtual void barrier() = 0;
  /// One text of each rank, in their order. Synchronizes.
  [[nodiscard]] virtual std::vector<std::string> gather(const std::string& text) = 0;

  /// Tells the other ranks why this one ends, where there is a way: they end with the same message instead of waiting for it. No exchange
  /// works after that.
  virtual void report_failure(const std::string& why);

  /// How long this rank waits for the others from here on, also those that these are a part of. A program's own group gets it, too.
  virtual void set_timeout(std::chrono::seconds) {}

  /// Gives back what the exchanges need, threads and connections; from here on they throw. At the end of a program that keeps the object.
  virtual void close() {}

  /// The ranks that this one is a part of (ranks_of_node()); null: none.
  [[nodiscard]] const std::shared_ptr<Communicator>& whole() const { return whole_; }

 protected:
  Communicator(int64_t rank, int64_t size) : rank_(rank), size_(size) {}

 private:
  friend std::shared_ptr<Communicator> ranks_of_node(const std::shared_ptr<Communicator>& ranks);
  /// A communicator of `members` alone, this rank among them. Each rank calls it at the same time, with its own members.
  [[nodiscard]] virtual std::shared_ptr<Communicator> among(const std::vector<int64_t>& members) = 0;

  int64_t rank_, size_;
  std::shared_ptr<Communicator> whole_;
};

/// report_failure() with the first line of what the error says.
void report_failure_of(Communicator& ranks, const std::exception& error);

/// Where a launcher says that this process stands.
struct Launch {
  int64_t rank = 0, size = 1;
  int64_t local_rank = 0;  ///< Among the processes of this machine: the number of its GPU.
  std::string launcher;    ///< "torchrun", "Slurm", "MPI"; empty: none, this process is alone.
  std::string address;     ///< Of rank 0.
  int64_t port = 0;
  std::string attempt = "0";    ///< Of a world that torchrun starts again after a failure.
  bool store_is_there = false;  ///< torchrun keeps a store; else rank 0 does.
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (torchrun, accelerate), or Slurm's or MPI's variables.
/// @param variable  as std::getenv.  @throws ValueError naming a variable that is missing or wrong.
[[nodiscard]] Launch launch_of(const std::function<const char*(const char*)>& variable);
/// The same of this process.
[[nodiscard]] Launch launch_of_environment();

/// One process: its exchanges change nothing.
[[nodiscard]] std::shared_ptr<Communicator> single_process();

/// Rank 0 of so many that do not exist: for plans. Its exchanges do nothing.
[[nodiscard]] std::shared_ptr<Communicator> planned_ranks(int64_t size);

/// Those of `ranks` that run on this machine, numbered in their order; `ranks` itself if that is all of them. Each rank makes the call.
/// A machine is known by its name, and by GROUP_RANK (torchrun) or SLURM_NODEID.  @throws ValueError on all ranks if one is alone on its
/// machine; where `ranks` are a program's own group without a store.
[[nodiscard]] std::shared_ptr<Communicator> ranks_of_node(const std::shared_ptr<Communicator>& ranks);

/// Meets the other ranks that `launch` speaks of: NCCL for a GPU, a TCPStore for a CPU.
/// @param timeout  how long a rank waits for the others, here and in each exchange.
/// @throws ValueError for a GPU without NCCL in this build; IoError naming the ranks that did not come in time.
[[nodiscard]] std::shared_ptr<Communicator> communicator_of(const Launch& launch, at::Device device,
                                                            std::chrono::seconds timeout = Communicator::kDefaultTimeout);

/// A program's own process group (torch/csrc/distributed/c10d/ProcessGroup.hpp). Texts go through the group's store, if it has one, and
/// ranks wait for each other as long as the group's timeout says. @param device  that tensors will be on.
[[nodiscard]] std::shared_ptr<Communicator> communicator_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                              at::Device device);
/// A group that Python made, by its name: torch.distributed.group.WORLD.group_name. @throws ValueError if there is none such.
[[nodiscard]] std::shared_ptr<Communicator> communicator_over(const std::string& group_name, at::Device device);

/// Ranks that share nothing but a store. For CPUs and small tensors: each rank reads what every other wrote. Sums are added in the
/// order of the ranks, so all ranks get the same bits. @param keeps_store  the store ends with this process: the communicator's end waits
/// for the other ranks'.
[[nodiscard]] std::shared_ptr<Communicator> communicator_over(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                              int64_t size, std::chrono::milliseconds timeout,
                                                              bool keeps_store = false);

/// The result of `work`. What it throws is told to the other ranks first. @param ranks  null: there are no others.
template <class Work>
auto reporting_failures(Communicator* ranks, const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    if (ranks != nullptr) report_failure_of(*ranks, error);
    throw;
  }
}

/// The sums over the ranks of each of some numbers of the hosts. The host waits for the other ranks'.
[[nodiscard]] std::vector<int64_t> sum_over(Communicator& ranks, std::vector<int64_t> values);
/// Whether it is true on a rank.
[[nodiscard]] bool any_of(Communicator& ranks, bool value);
/// Rank 0's text. Synchronizes.
[[nodiscard]] std::string text_of_first(Communicator& ranks, const std::string& text);
/// @throws ValueError on every rank if the texts differ, naming the ranks and values. Synchronizes.
void check_same_on_all(Communicator& ranks, const std::string& what, const std::string& value);

}  // namespace qlorapp
