// SPDX-License-Identifier: Apache-2.0
/// AdamW over an arena: one call steps every adapter at once.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"
#include "qlorapp/nn/adapter_arena.hpp"

namespace qlorapp {

/// Decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101) with the moments in float32, in torch.optim.AdamW's order of
/// roundings, or in eight bits by block (Dettmers et al. 2022, arXiv:2110.02861). Blocks never cross parameters: the arena aligns
/// them. Does not synchronize.
class AdamW {
 public:
  enum class State : uint8_t { kFloat32, kEightBit };

  struct Options {
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double weight_decay = 0.0;
    State state = State::kFloat32;
  };

  /// Steps the arena's values in place. The arena must outlive the optimizer.
  AdamW(AdapterArena& arena, const Options& options);

  /// One step with the arena's gradients, which it does not change.
  /// @throws ValueError with 8-bit moments, if a gradient is not finite; nothing is changed then.
  void step(double learning_rate);

  /// Steps taken so far.
  [[nodiscard]] int64_t step_count() const { return steps_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] Bytes state_bytes() const;

  /// The moments, flat over the arena: exp_avg and exp_avg_sq, or state1, state2, absmax1 and absmax2. They share memory with the
  /// optimizer: writing them restores it.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> state_tensors() const;
  void set_step_count(int64_t steps) { steps_ = steps; }

 private:
  AdapterArena* arena_;
  Options options_;
  int64_t steps_ = 0;
  at::Tensor first_, second_;                ///< float32 (n), or uint8 (n) codes.
  at::Tensor first_absmax_, second_absmax_;  ///< float32 (n / 256) with 8-bit moments.
};

}  // namespace qlorapp
