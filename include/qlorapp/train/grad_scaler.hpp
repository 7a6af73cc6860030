// SPDX-License-Identifier: Apache-2.0
/// Dynamic loss scaling, so that small fp16 gradients survive the backward pass.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/error.hpp"
#include "qlorapp/core/field_table.hpp"

namespace qlorapp {

/// A call that torch refuses with an assertion: nothing was scaled or unscaled before. Python: AssertionError.
class GradScalerAssertion : public Error {
 public:
  using Error::Error;
};

/// Calls in the wrong order. Python: RuntimeError.
class GradScalerOrder : public Error {
 public:
  using Error::Error;
};

/// Gradients are not finite, and training cannot go on. Python: TrainingDiverged, a RuntimeError.
class TrainingDiverged : public Error {
 public:
  using Error::Error;
};

/// Options::max_consecutive_skips steps in a row found no finite gradients.
class LossScaleExhausted : public TrainingDiverged {
 public:
  using TrainingDiverged::TrainingDiverged;
};

/// fp16 has no positive value below 2^-24, so small gradients round to zero. The scaler multiplies the loss by S before
/// backward, divides the gradients by S before the optimizer sees them, and moves S by what it finds. bf16 has the exponent
/// range of fp32 and needs none of this: with `enabled = false` every call passes through and step() always steps.
///
/// Rule, applied by update() once per *optimizer* step, however many micro-batches fed it:
///
///     overflow found       S ← max(S · backoff_factor, min_scale)    streak ← 0
///     streak + 1 == N      S ← S · growth_factor, if that is finite  streak ← 0      N = growth_interval
///     otherwise            S ← S                                     streak += 1
///
/// Call order per optimizer step, checked: scale (any number) → unscale_ (optional) → step → update. One scaler serves
/// several optimizers, told apart by an id of the caller's choice. Knows nothing of accumulation, clipping or the
/// optimizer's type; compose them in train/step.hpp. S is kept in float32 on the device of the first output that is scaled.
/// Not thread-safe. Deterministic.
///
/// Gradients are checked at unscale_(). Those that turn infinite later are not noticed, as in torch.
///
/// Source: Micikevicius et al. 2018, arXiv:1710.03740 §3.2 (loss scaling). Names, rule, defaults, stages, errors and state
/// are those of torch.amp.GradScaler; tests/python/test_grad_scaler.py holds both to the same trace.
class GradScaler {
 public:
  struct Options {
    at::DeviceType device = at::kCUDA;  ///< Where a tensor given to update() must be. Without that device: warns, disabled.
    double init_scale = 65536.0;        ///< S before the first step.
    double growth_factor = 2.0;         ///< > 1.
    double backoff_factor = 0.5;        ///< < 1.
    int64_t growth_interval = 2000;     ///< N, in optimizer steps without overflow.
    bool enabled = true;
    double min_scale = 0.0;             ///< Ours: a floor under backing off; 0 is none, as in torch (S reaches 0 after 166 skips).
    int64_t max_consecutive_skips = 0;  ///< Ours: update() throws after so many skipped steps in a row; 0 is no limit.
  };

  /// Everything that a resumed run needs, with torch's keys. Take it after update().
  struct State {
    double scale = 65536.0;
    double growth_factor = 2.0;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;
    int64_t growth_tracker = 0;  ///< The streak. Its key is torch's `_growth_tracker`.

    static constexpr auto fields() {
      return FieldTable{Field{"scale", &State::scale, "the loss scale"},
                        Field{"growth_factor", &State::growth_factor, "what it grows by"},
                        Field{"backoff_factor", &State::backoff_factor, "what it shrinks by"},
                        Field{"growth_interval", &State::growth_interval, "steps without overflow before it grows"},
                        Field{"_growth_tracker", &State::growth_tracker, "steps without overflow so far"}};
    }
  };

  /// Tells optimizers apart. One optimizer: leave the default.
  using OptimizerId = uint64_t;

  /// @throws GradScalerAssertion  if a factor is outside its range. ValueError naming one of our own options.
  explicit GradScaler(const Options& options);
  /// With the default options, those of torch.amp.GradScaler().
  GradScaler();

  /// A copy has its own S and streak: what either does later leaves the other alone.
  GradScaler(const GradScaler& other);
  GradScaler& operator=(const GradScaler& other);
  GradScaler(GradScaler&&) noexcept = default;
  GradScaler& operator=(GradScaler&&) noexcept = default;
  ~GradScaler() = default;

  /// @param outputs  any shape and dtype, usually the loss, () fp32.
  /// @returns outputs · S on the same autograd graph; `outputs` itself when disabled. Does not synchronize.
  [[nodiscard]] at::Tensor scale(const at::Tensor& outputs);
  /// The same for several outputs, on one device or more; S lives where the first is.
  [[nodiscard]] std::vector<at::Tensor> scale(at::TensorList outputs);

  /// Divides each gradient by S in place and notes whether any element was infinite or NaN. 1/S is formed in double.
  /// @param grads  any shapes, dtypes and devices; undefined entries are skipped. Does not synchronize.
  /// @param allow_fp16  half-precision gradients are refused otherwise: their weights should be fp32.
  /// @throws GradScalerOrder  when called twice, or after step(), without update() between. GradScalerAssertion before scale().
  ///         ValueError for fp16 gradients; nothing is changed then.
  void unscale_(at::TensorList grads, OptimizerId optimizer = 0, bool allow_fp16 = false);

  /// Unscales `grads` unless unscale_() already has, then calls `take_step` unless something infinite was found.
  /// Synchronizes once a device: it reads one float.
  /// @returns true if the step was taken.
  /// @throws GradScalerOrder as unscale_(). @throws GradScalerAssertion if no gradient was checked.
  template <std::invocable Step>
  bool step(Step&& take_step, at::TensorList grads = {}, OptimizerId optimizer = 0) {
    if (!options_.enabled) {
      std::invoke(take_step);
      return true;
    }
    const bool finite = found_only_finite(grads, optimizer);
    if (finite) std::invoke(take_step);  // if it throws, the stage stays: the step was not taken
    finish_step(optimizer, finite);
    return finite;
  }

  /// Discards the checks since the last update(), so that a failed step can be retried. S stays.
  void abandon_step() { optimizers_.clear(); }

  /// Applies the rule, or sets S to `new_scale`, and opens the next step. Does not synchronize.
  /// @throws GradScalerAssertion  if nothing was checked since the last update. LossScaleExhausted (see Options), after the
  ///         rule was applied.
  void update(std::optional<double> new_scale = std::nullopt);
  /// Sets S from a one-element tensor without gradient on Options::device.
  void update(const at::Tensor& new_scale);

  /// @returns S, or 1 when disabled. Synchronizes: for logs, not for the loop.
  [[nodiscard]] double get_scale() const;
  [[nodiscard]] double get_growth_factor() const { return options_.growth_factor; }
  [[nodiscard]] double get_backoff_factor() const { return options_.backoff_factor; }
  [[nodiscard]] int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  void set_growth_interval(int64_t interval) { options_.growth_interval = interval; }
  [[nodiscard]] bool is_enabled() const { return options_.enabled; }
  /// The options given, as changed by the set_… functions and load_state_dict(). init_scale is not S: get_scale() is.
  [[nodiscard]] const Options& options() const { return options_; }

  /// Steps in a row that max_consecutive_skips has counted. state_dict() has torch's keys, and lacks it.
  [[nodiscard]] int64_t consecutive_skips() const { return consecutive_skips_; }

  /// @throws GradScalerAssertion between unscale_() or step() and update(): what an optimizer's gradients held cannot be serialized.
  void check_serializable() const;

  /// Empty when disabled. Synchronizes.
  [[nodiscard]] std::optional<State> state_dict() const;
  /// Does nothing when disabled. @throws GradScalerOrder if the state is empty.
  void load_state_dict(const std::optional<State>& state);

  // For an optimizer that unscales itself: it multiplies by inverse_scale() as it reads its gradients, and record() replaces unscale_().

  /// @returns 1 / S, float32 () on the device of S, formed in double. Undefined when disabled. Does not synchronize.
  /// @throws GradScalerAssertion before scale().
  [[nodiscard]] at::Tensor inverse_scale() const;
  /// Notes what was found when 1 / S was applied.
  /// @param found_inf  float32 (), 0 if every unscaled gradient is finite.  @throws GradScalerOrder as unscale_().
  void record(const at::Tensor& found_inf, OptimizerId optimizer = 0);
  /// Restores consecutive_skips(), which State lacks.
  void set_consecutive_skips(int64_t skips) { consecutive_skips_ = skips; }

 private:
  enum class Stage : uint8_t { kReady, kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kReady;
    bool skipped = false;
    std::map<c10::Device, at::Tensor, bool (*)(c10::Device, c10::Device)> found_inf;
    PerOptimizer();
  };

  void check_initialized(const char* function) const;
  PerOptimizer& begin_unscale(OptimizerId optimizer);
  void initialize_on(at::Device device);
  bool found_only_finite(at::TensorList grads, OptimizerId optimizer);
  void finish_step(OptimizerId optimizer, bool taken);
  void count_skips();

  Options options_;
  int64_t init_growth_tracker_ = 0;
  int64_t consecutive_skips_ = 0;
  at::Tensor scale_;           // () float32, undefined before the first scale()
  at::Tensor growth_tracker_;  // () int32, beside it
  std::map<OptimizerId, PerOptimizer> optimizers_;
};

}  // namespace qlorapp
