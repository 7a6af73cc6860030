// SPDX-License-Identifier: Apache-2.0
/// AdamW over an arena: one call steps every adapter at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/adapter_arena.hpp"
#include "qlorapp/core/units.hpp"

namespace qlorapp {

class PagedState;

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
    bool paged =
        false;  ///< On a GPU the moments give way under memory pressure (paged_state.hpp). Changes no number; nothing on a CPU.
  };

  /// Steps the arena's values in place. The arena must outlive the optimizer.
  AdamW(AdapterArena& arena, const Options& options);

  /// One step with the arena's gradients, which it does not change.
  /// @param multiplier, skip  float32 () on the arena's device, or undefined: GradientNorm's multiplier, which the gradients
  /// are
  ///        multiplied by as they are read, and found_inf: unless it is 0, values and moments stay as they are (the step
  ///        counts).
  /// @throws ValueError on a CPU with 8-bit moments, if a gradient is not finite and no `skip` says so; nothing is changed
  /// then.
  void step(double learning_rate, const at::Tensor& multiplier = {}, const at::Tensor& skip = {});

  /// Steps taken so far.
  [[nodiscard]] int64_t step_count() const { return steps_; }
  [[nodiscard]] const Options& options() const { return options_; }
  /// Of both moments, wherever they are.
  [[nodiscard]] Bytes state_bytes() const;

  /// The moments, flat over the arena: exp_avg and exp_avg_sq, or state1, state2, absmax1 and absmax2. They share memory with the
  /// optimizer: writing them restores it. Paged ones that are on the host are waited for, and do not move while they are held.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> state_tensors() const;
  void set_step_count(int64_t steps) { steps_ = steps; }
  /// Null unless paged and on a GPU.
  [[nodiscard]] PagedState* paged_state() const { return paged_.get(); }

 private:
  AdapterArena* arena_;
  Options options_;
  int64_t steps_ = 0;
  [[nodiscard]] std::vector<at::Tensor> moments() const;
  /// One step of elements [begin, begin + count) of the arena with their moments.
  void update(std::vector<at::Tensor>& moments, int64_t begin, int64_t count, double learning_rate, const at::Tensor& multiplier,
              const at::Tensor& skip);

  /// float32 (n) twice; or uint8 (n) codes twice and float32 (n / 256) scales twice. Empty if paged_ has them.
  std::vector<at::Tensor> moments_;
  std::shared_ptr<PagedState> paged_;
};

}  // namespace qlorapp
