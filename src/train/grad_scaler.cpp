// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/grad_scaler.hpp"

#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {
namespace {

bool device_order(c10::Device a, c10::Device b) { return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index()); }

using Gradients = std::map<c10::Device, std::map<at::ScalarType, std::vector<at::Tensor>>, bool (*)(c10::Device, c10::Device)>;

/// The kernel wants one device and one dtype a call. Everything is looked at before anything is changed.
Gradients group(at::TensorList grads, bool allow_fp16) {
  Gradients groups(device_order);
  for (const at::Tensor& grad : grads) {
    if (!grad.defined()) continue;
    QLORAPP_CHECK_VALUE(allow_fp16 || grad.scalar_type() != at::kHalf, "Attempting to unscale FP16 gradients.");
    // Duplicate indices of a sparse gradient can overflow when they are added up; only the sums are worth checking.
    QLORAPP_CHECK_VALUE(!grad.is_sparse() || grad.is_coalesced() || grad.scalar_type() != at::kHalf,
                        "[GradScaler] a sparse fp16 gradient must be coalesced. Call coalesce() on it first.");
    const at::Tensor values = grad.is_sparse() ? grad._values() : grad;
    groups[values.device()][values.scalar_type()].push_back(values);
  }
  return groups;
}

}  // namespace

GradScaler::PerOptimizer::PerOptimizer() : found_inf(device_order) {}

GradScaler::GradScaler(const Options& options) : options_(options) {
  if (options_.enabled && options_.device == at::kCUDA && !at::hasCUDA()) {
    log_warning("GradScaler is enabled for cuda, but CUDA is not available. Disabling.");
    options_.enabled = false;
  }
  if (!options_.enabled) return;
  if (options_.growth_factor <= 1.0) throw GradScalerAssertion("The growth factor must be > 1.0.");
  if (options_.backoff_factor >= 1.0) throw GradScalerAssertion("The backoff factor must be < 1.0.");
  QLORAPP_CHECK_VALUE(options_.min_scale >= 0 && std::isfinite(options_.min_scale),
                      "[GradScaler] min_scale must be finite and >= 0; got {}.", options_.min_scale);
  QLORAPP_CHECK_VALUE(options_.max_consecutive_skips >= 0,
                      "[GradScaler] max_consecutive_skips must be >= 0; got {}. 0 is no limit.", options_.max_consecutive_skips);
}

GradScaler::GradScaler() : GradScaler(Options()) {}

GradScaler::GradScaler(const GradScaler& other)
    : options_(other.options_),
      init_growth_tracker_(other.init_growth_tracker_),
      consecutive_skips_(other.consecutive_skips_),
      optimizers_(other.optimizers_) {  // found_inf is written once, so both may hold it
  if (!other.scale_.defined()) return;
  scale_ = other.scale_.clone();
  growth_tracker_ = other.growth_tracker_.clone();
}

GradScaler& GradScaler::operator=(const GradScaler& other) { return *this = GradScaler(other); }

void GradScaler::check_serializable() const {
  if (optimizers_.empty()) return;
  throw GradScalerAssertion(
      "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler.update().");
}

void GradScaler::check_initialized(const char* function) const {
  if (scale_.defined()) return;
  throw GradScalerAssertion(
      message("Attempted {} but _scale is None.  This may indicate your script did not use scaler.scale(loss or outputs) earlier "
              "in the iteration.",
              function));
}

void GradScaler::initialize_on(at::Device device) {
  if (scale_.defined()) return;
  scale_ = at::full({}, options_.init_scale, at::TensorOptions().dtype(at::kFloat).device(device));
  growth_tracker_ = at::full({}, init_growth_tracker_, at::TensorOptions().dtype(at::kInt).device(device));
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  QLORAPP_CHECK_VALUE(outputs.defined(), "[GradScaler] outputs must be tensors; got an undefined one.");
  if (!options_.enabled) return outputs;
  initialize_on(outputs.device());
  return outputs * scale_.to(outputs.device(), scale_.scalar_type(), /*non_blocking=*/true);
}

std::vector<at::Tensor> GradScaler::scale(at::TensorList outputs) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

GradScaler::PerOptimizer& GradScaler::begin_unscale(OptimizerId optimizer) {
  check_initialized("unscale_");
  PerOptimizer& state = optimizers_[optimizer];
  if (state.stage == Stage::kUnscaled) {
    throw GradScalerOrder("unscale_() has already been called on this optimizer since the last update().");
  }
  if (state.stage == Stage::kStepped) throw GradScalerOrder("unscale_() is being called after step().");
  return state;
}

at::Tensor GradScaler::inverse_scale() const {
  if (!options_.enabled) return {};
  check_initialized("inverse_scale");
  return scale_.to(at::kDouble).reciprocal().to(at::kFloat);
}

void GradScaler::record(const at::Tensor& found_inf, OptimizerId optimizer) {
  if (!options_.enabled) return;
  PerOptimizer& state = begin_unscale(optimizer);
  state.found_inf.clear();
  state.found_inf.emplace(found_inf.device(), found_inf);
  state.stage = Stage::kUnscaled;
}

void GradScaler::unscale_(at::TensorList grads, OptimizerId optimizer, bool allow_fp16) {
  if (!options_.enabled) return;
  PerOptimizer& state = begin_unscale(optimizer);

  const at::NoGradGuard no_grad;
  Gradients groups = group(grads, allow_fp16);
  const at::Tensor inverse = inverse_scale();
  state.found_inf.clear();
  for (auto& [device, by_dtype] : groups) {
    at::Tensor found_inf = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
    const at::Tensor here = inverse.to(device, at::kFloat, /*non_blocking=*/true);
    for (auto& [dtype, values] : by_dtype) at::_amp_foreach_non_finite_check_and_unscale_(values, found_inf, here);
    state.found_inf.emplace(device, std::move(found_inf));
  }
  state.stage = Stage::kUnscaled;
}

bool GradScaler::found_only_finite(at::TensorList grads, OptimizerId optimizer) {
  check_initialized("step");
  if (optimizers_[optimizer].stage == Stage::kStepped) {
    throw GradScalerOrder("step() has already been called since the last update().");
  }
  if (optimizers_[optimizer].stage == Stage::kReady) unscale_(grads, optimizer);
  const PerOptimizer& state = optimizers_[optimizer];
  if (state.found_inf.empty()) throw GradScalerAssertion("No inf checks were recorded for this optimizer.");
  double found = 0;
  for (const auto& [device, found_inf] : state.found_inf) found += found_inf.item<double>();  // the step's one host read
  return found == 0;
}

void GradScaler::finish_step(OptimizerId optimizer, bool taken) {
  PerOptimizer& state = optimizers_[optimizer];
  state.stage = Stage::kStepped;
  state.skipped = !taken;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  check_initialized("update");
  if (new_scale) {
    scale_.fill_(*new_scale);
    optimizers_.clear();
    return;
  }
  at::Tensor combined;
  for (const auto& [id, state] : optimizers_) {
    for (const auto& [device, found_inf] : state.found_inf) {
      const at::Tensor here = found_inf.to(scale_.device(), at::kFloat, /*non_blocking=*/true);
      combined = combined.defined() ? combined + here : here;
    }
  }
  if (!combined.defined()) throw GradScalerAssertion("No inf checks were recorded prior to update.");
  at::_amp_update_scale_(scale_, growth_tracker_, combined, options_.growth_factor, options_.backoff_factor,
                         options_.growth_interval);
  if (options_.min_scale > 0) scale_.clamp_min_(options_.min_scale);
  count_skips();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!options_.enabled) return;
  check_initialized("update");
  if (new_scale.device().type() != options_.device || new_scale.numel() != 1 || new_scale.requires_grad()) {
    throw GradScalerAssertion(
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
        "requires_grad=False.");
  }
  scale_.copy_(new_scale.reshape({}));
  optimizers_.clear();
}

/// Closes the step: forgets what the optimizers found, and stops a run whose gradients are never finite.
void GradScaler::count_skips() {
  bool stepped = false;
  bool skipped = false;
  for (const auto& [id, state] : optimizers_) (state.skipped ? skipped : stepped) |= state.stage == Stage::kStepped;
  optimizers_.clear();
  if (skipped) {
    ++consecutive_skips_;
  } else if (stepped) {
    consecutive_skips_ = 0;
  }
  if (options_.max_consecutive_skips > 0 && consecutive_skips_ >= options_.max_consecutive_skips) {
    const int64_t skips = std::exchange(consecutive_skips_, 0);
    throw LossScaleExhausted(
        message("[GradScaler] {} optimizer steps in a row found infinite or NaN gradients; the loss scale is down to {}. Overflow "
                "ends after a few backoffs, so the loss or the weights are not finite themselves: look for NaN in the loss, lower "
                "the learning rate, or train in bf16 or fp32.",
                skips, get_scale()));
  }
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1.0;
  return scale_.defined() ? scale_.item<double>() : options_.init_scale;
}

std::optional<GradScaler::State> GradScaler::state_dict() const {
  if (!options_.enabled) return std::nullopt;
  return State{.scale = get_scale(),
               .growth_factor = options_.growth_factor,
               .backoff_factor = options_.backoff_factor,
               .growth_interval = options_.growth_interval,
               .growth_tracker = growth_tracker_.defined() ? growth_tracker_.item<int>() : init_growth_tracker_};
}

void GradScaler::load_state_dict(const std::optional<State>& state) {
  if (!options_.enabled) return;
  if (!state) {
    throw GradScalerOrder("The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.");
  }
  options_.init_scale = state->scale;
  options_.growth_factor = state->growth_factor;
  options_.backoff_factor = state->backoff_factor;
  options_.growth_interval = state->growth_interval;
  init_growth_tracker_ = state->growth_tracker;
  if (scale_.defined()) {
    scale_.fill_(state->scale);
    growth_tracker_.fill_(state->growth_tracker);
  }
}

}  // namespace qlorapp
