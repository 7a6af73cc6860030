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

/// Hands out the rows of one epoch after the other, batch by batch; a batch never spans two epochs.
class Sampler {
 public:
  /// Where the next batch starts: all that a resumed run needs.
  struct Position {
    int64_t epoch = 0;
    int64_t row = 0;  ///< Rows of this epoch that have been handed out.
    friend bool operator==(const Position&, const Position&) = default;
  };

  Sampler(int64_t rows, SamplerOptions options);

  /// @returns the next batch_size rows, or what is left of the epoch; the epoch after its last batch begins with the next call.
  [[nodiscard]] std::vector<int64_t> next(int64_t batch_size);
  [[nodiscard]] bool at_end_of_epoch() const { return position_.row == rows_; }

  [[nodiscard]] Position position() const { return position_; }
  /// @throws ValueError for a position outside.
  void seek(Position position);

 private:
  int64_t rows_;
  SamplerOptions options_;
  Position position_;
  std::vector<int64_t> order_;
};

}  // namespace qlorapp
