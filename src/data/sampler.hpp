// SPDX-License-Identifier: Apache-2.0
/// In which order an epoch visits the rows. The same seed gives the same order as transformers' Trainer.
///
/// Trainer wraps its RandomSampler into accelerate's SeedableRandomSampler: epoch e visits torch.randperm(n) of a CPU generator
/// seeded with (data_seed, else seed) + e. A pure function of (seed, epoch), so a run resumes by position alone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

/// transformers' train_sampling_strategy.
enum class SamplingStrategy {
  kRandom,
  kSequential,
  /// Rows of similar length together, the longest first (transformers' get_length_grouped_indices). Trainer draws that order
  /// from the global generator, which nothing can repeat; here it comes from the epoch's own.
  kGroupByLength,
};
/// @throws ValueError naming the known ones: "random", "sequential", "group_by_length".
[[nodiscard]] SamplingStrategy sampling_strategy(std::string_view name);

struct SamplerOptions {
  SamplingStrategy strategy = SamplingStrategy::kRandom;
  int64_t seed = 42;             ///< TrainingArguments' data_seed, else its seed.
  int64_t group_size = 8;        ///< kGroupByLength: rows of one optimizer step (batch size × accumulation).
  std::vector<int64_t> lengths;  ///< kGroupByLength: tokens of each row.
};

/// @returns each of 0 … rows - 1 once, in the order of epoch `epoch`. @throws ValueError for no rows or options that do not
/// fit.
[[nodiscard]] std::vector<int64_t> epoch_order(int64_t rows, int64_t epoch, const SamplerOptions& options);

}  // namespace qlorapp
