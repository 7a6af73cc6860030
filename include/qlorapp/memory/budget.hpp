// SPDX-License-Identifier: Apache-2.0
/// The fastest step that fits a budget: what each block keeps, MemorySettings, and the micro-batch.
///
/// Blocks are alike, so the knapsack over them has one item many times: an optimum keeps one policy in the first blocks and the
/// next richer one, in seconds saved per byte, in the last (backward frees those first). How many is found by plan, for each
/// pair of policies, each way to make the rest of the step smaller and each micro-batch, and the roofline says which is fastest.
/// Nothing is tried out on the device.
#pragma once

#include <string>
#include <string_view>

#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/planner.hpp"

namespace qlorapp {

struct BudgetRequest {
  Bytes room;                   ///< For all that torch reserves.
  int64_t effective_batch = 0;  ///< Rows of an optimizer step, whose divisors micro-batches may be; 0: the settings' batch.
  double average_length = 0;    ///< Of a row, in tokens, for the time; 0: the settings' length.
  std::string_view name = "memory_budget";  ///< Its name in errors.
};

struct BudgetChoice {
  PlanSettings settings;  ///< With batch, accumulation, segments and memory as chosen.
  MemoryPlan plan;
  std::string keep;    ///< As TrainingArguments has it: "everything", "input_on_host,everything:12".
  double seconds = 0;  ///< Of an optimizer step, estimated.
  std::string way;     ///< "batch 1 x 16, keeping input_on_host,everything:15, embedding on the host".
  std::string text;    ///< The choice, its cost, and the next choices above and below. Three lines or less.
};

/// @param rates  of the device: they decide between ways that fit.
/// @throws ValueError if nothing fits, with the bytes that are missing and the three cheapest ways out: batch, length, rank.
[[nodiscard]] BudgetChoice fit_budget(const PlanSettings& settings, const Gpu& rates, const BudgetRequest& request);

/// Memory of a smaller batch, shorter rows and a lower rank, in this order, and whether it fits: "batch 1: 5.1 GiB, fits; …".
[[nodiscard]] std::string ways_out(const PlanSettings& settings, Bytes room);

/// "One row of 2048 tokens takes 9.1 GiB, and there are 8.0 GiB: 1.1 GiB are missing. Ways out: …", for a run that ran out of memory.
[[nodiscard]] std::string advice_for_one_row(PlanSettings settings, Bytes room);

}  // namespace qlorapp
