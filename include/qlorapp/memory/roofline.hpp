// SPDX-License-Identifier: Apache-2.0
/// How long a step takes on a GPU, from its shapes and the GPU's rates.
///
///     products   2·P forward, 2·P backward (frozen weights have no gradient), what is computed again, LoRA, head; over the rate of
///                the compute dtype: tensor cores for 16 bits, and for the frozen weights of fp8=True; without them for float32
///     attention  2·T·D a token and block forward, 5·T·D backward (causal), at the rate of the kernel that the GPU runs
///     memory     every dequantized weight written and read, every elementwise pass; over the bandwidth
///     host       launches; counts where the GPU is faster than they are
///     copies     of a base in host memory or in parts on several ranks, beside the rest: half of them forward, half backward; each
///                pass waits for its half
///
/// The parts are added up, because one stream runs them one after the other; the host's counts where it is longer. The
/// fractions of the published rates come from docs/performance.md, all from one H200; nothing is known of other cards but what
/// gpu_table.hpp says.
#pragma once

#include <algorithm>
#include <cstdint>

#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/planner.hpp"

namespace qlorapp {

struct StepTime {
  double products = 0, attention = 0, memory = 0, host = 0;  ///< Seconds of one micro-batch.
  double copies = 0;                                         ///< The same, of the blocks of base_on_host or base_sharding.
  double forward_share = 0.5;                                ///< Of the computation.
  double optimizer = 0;                                      ///< Seconds of an optimizer step.
  Evidence evidence = Evidence::kExtrapolated;

  /// Seconds of a micro-batch whose weights are on the GPU.
  [[nodiscard]] double computation() const { return std::max(products + attention + memory, host); }
  /// Seconds in which it waits for copies.
  [[nodiscard]] double waits() const {
    const double forward = forward_share * computation(), half = copies / 2;
    return std::max(0.0, half - forward) + std::max(0.0, half - (computation() - forward));
  }
  /// Seconds.
  [[nodiscard]] double micro_batch() const { return computation() + waits(); }
};

/// @param average_length  of a row in tokens; the settings' length is the longest.
/// @throws ValueError if the GPU's rates are not known.
[[nodiscard]] StepTime step_time(const PlanSettings& settings, const Gpu& gpu, double average_length);

}  // namespace qlorapp
