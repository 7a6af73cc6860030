// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "core/check.hpp"
#include "qlorapp/dist/communicator.hpp"

namespace qlorapp {
namespace {

using Variable = std::function<const char*(const char*)>;

/// How a launcher names what a rank must know.
struct Names {
  const char *launcher, *size, *rank, *local_rank;
};
constexpr Names kLaunchers[] = {
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"},
    {"Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"},
    {"MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"},
};

int64_t number(const Variable& variable, const char* name, int64_t lowest, int64_t highest) {
  const char* const text = variable(name);
  QLORAPP_CHECK_VALUE(text != nullptr,
                      "[ranks] a launcher must set {}; it is missing. Start with torchrun --nproc-per-node N, or unset WORLD_SIZE "
                      "to run one process.",
                      name);
  const std::string_view digits(text);
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  QLORAPP_CHECK_VALUE(error == std::errc{} && stop == digits.data() + digits.size() && value >= lowest && value <= highest,
                      "[ranks] {} must be a number from {} to {}; got '{}'. The launcher sets it: torchrun --nproc-per-node N.",
                      name, lowest, highest, digits);
  return value;
}

constexpr int64_t kMostRanks = 65536;

}  // namespace

Launch launch_of(const Variable& variable) {
  Launch launch;
  const Names* by = nullptr;
  for (const Names& each : kLaunchers) {
    const char* const size = variable(each.size);
    if (size == nullptr || std::string_view(size).empty()) continue;
    by = &each;
    break;
  }
  if (by == nullptr || number(variable, by->size, 1, kMostRanks) == 1) return launch;
  launch.launcher = by->launcher;
  launch.size = number(variable, by->size, 1, kMostRanks);
  launch.rank = number(variable, by->rank, 0, launch.size - 1);
  launch.local_rank = number(variable, by->local_rank, 0, launch.size - 1);
  const bool is_torchrun = launch.launcher == "torchrun";
  const char* const address = variable("MASTER_ADDR");
  // Slurm and MPI name no address: on one machine it is this one.
  const char* const nodes = variable("SLURM_STEP_NUM_NODES");
  const bool is_one_node = !is_torchrun && (nodes == nullptr ? launch.launcher == "MPI" : std::string_view(nodes) == "1");
  QLORAPP_CHECK_VALUE(address != nullptr || is_one_node, "[ranks] MASTER_ADDR must name the machine of rank 0; it is missing. {}",
                      is_torchrun
                          ? "Start with torchrun, which sets it."
                          : "Set it before srun: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)");
  launch.address = address != nullptr ? address : "127.0.0.1";
  constexpr int64_t kPort = 29500;  // torch's default
  launch.port = is_torchrun || variable("MASTER_PORT") != nullptr ? number(variable, "MASTER_PORT", 1, 65535) : kPort;
  if (const char* const agent = variable("TORCHELASTIC_USE_AGENT_STORE")) launch.store_is_there = std::string_view(agent) == "True";
  if (const char* const attempt = variable("TORCHELASTIC_RESTART_COUNT")) launch.attempt = attempt;
  return launch;
}

Launch launch_of_environment() {
  return launch_of([](const char* name) { return std::getenv(name); });
}

}  // namespace qlorapp
