// SPDX-License-Identifier: Apache-2.0
// The memory of a training step, computed by rehearsing it (nn/rehearsal.hpp): needs no GPU and no model. One line a setting.
//
//   bench_step_memory MODEL [NAME=VALUE …] [/ NAME=VALUE …] …
//     MODEL, NAME=VALUE  as of bench_train_step. What stands before a slash holds for the settings behind it
// MiB. Beside the phases' peaks stand eight-bit moments and what cuBLAS keeps on Hopper, which the total has in it.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "train_step_setting.hpp"

namespace {

using namespace qlorapp;

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

int run(const std::vector<std::string>& arguments) {
  QLORAPP_CHECK_VALUE(!arguments.empty(), "which MODEL?");
  const format::ModelConfig config = bench::config_of(arguments.front());
  bench::Setting setting;
  const auto print = [&] {
    const Rehearsal found = setting.rehearsed(config, at::kBFloat16);
    const int64_t elements = found.adapters.count / 8;  // float32 values and gradients
    const int64_t beside = 2 * elements + 2 * 4 * elements / 256 + (int64_t{32} << 20);
    const std::string tile = setting.memory.mlp_tile_rows > 0 ? concat(setting.memory.mlp_tile_rows) : std::string("-");
    const std::string chunk = setting.memory.loss_chunk_rows > 0 ? concat(setting.memory.loss_chunk_rows) : std::string("-");
    std::printf("| %s, %ld x %ld | %s | %s | %s | %s | %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f | %.3f | %.0f |\n",
                arguments.front().c_str(), static_cast<long>(setting.rows), static_cast<long>(setting.length), setting.keep.c_str(),
                chunk.c_str(), tile.c_str(), std::string(to_string(setting.memory.weight_workspace)).c_str(),
                setting.memory.embedding_on_host ? "host" : "-", mib(found.weights.count), mib(found.adapters.count), mib(beside),
                mib(found.forward.count), mib(found.loss.count), mib(found.backward.count),
                static_cast<double>(found.peak().count + beside) / (1 << 30), mib(found.pinned.count));
  };
  std::puts(
      "| model, batch x sequence | keep | loss chunk | tile | workspace | embedding | base | adapters, gradients | moments, "
      "cuBLAS | "
      "forward | loss | backward | total GiB | pinned |");
  std::puts("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (arguments[i] == "/") print();
    else QLORAPP_CHECK_VALUE(setting.set(arguments[i]), "a setting is NAME=VALUE; got ", arguments[i]);
  }
  print();
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step_memory: %s\n", error.what());
    return 2;
  }
}
