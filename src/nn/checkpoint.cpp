// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/checkpointed_block.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Run = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// States of the CPU generator and of the generators of the devices that hold an input.
class RandomState {
 public:
  explicit RandomState(const std::vector<at::Tensor>& inputs) {
    remember(at::detail::getDefaultCPUGenerator());
    std::vector<c10::Device> seen;
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || input.device().is_cpu() || input.device().is_meta()) continue;
      if (std::find(seen.begin(), seen.end(), input.device()) != seen.end()) continue;
      seen.push_back(input.device());
      remember(at::globalContext().defaultGenerator(input.device()));
    }
  }
  void restore() const {
    for (const auto& [generator, state] : states_) {
      at::Generator target = generator;
      const std::lock_guard lock(target.mutex());
      target.set_state(state);
    }
  }

 private:
  void remember(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Autocast of the CPU and of the accelerator, as it stands at construction; set() makes it so again.
class AutocastState {
 public:
  AutocastState() : cache_(at::autocast::is_autocast_cache_enabled()) {
    for (size_t i = 0; i < kTypes.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kTypes[i]);
      dtype_[i] = at::autocast::get_autocast_dtype(kTypes[i]);
    }
  }
  void set() const {
    for (size_t i = 0; i < kTypes.size(); ++i) {
      at::autocast::set_autocast_enabled(kTypes[i], enabled_[i]);
      at::autocast::set_autocast_dtype(kTypes[i], dtype_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  static constexpr std::array<at::DeviceType, 2> kTypes{at::kCPU, at::kCUDA};
  std::array<bool, 2> enabled_{};
  std::array<at::ScalarType, 2> dtype_{};
  bool cache_;
};

/// Sets a state for a scope and puts the previous one back, also when the scope is left by an exception.
template <class State>
struct Restored {
  explicit Restored(const State& wanted, State now) : before(std::move(now)) {
    if constexpr (requires { wanted.set(); }) {
      wanted.set();
    } else {
      wanted.restore();
    }
  }
  ~Restored() {
    if constexpr (requires { before.set(); }) {
      before.set();
    } else {
      before.restore();
    }
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;
  State before;
};

struct CheckpointState : torch::CustomClassHolder {
  CheckpointState(Run to_run, size_t count, const std::vector<at::Tensor>& inputs)
      : run(std::move(to_run)), input_count(count), random(inputs) {}
  Run run;
  size_t input_count;
  RandomState random;
  AutocastState autocast;
};

struct CheckpointFunction : torch::autograd::Function<CheckpointFunction> {
  /// `tensors` holds the inputs and, behind them, the parameters.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const c10::intrusive_ptr<CheckpointState>& state) {
    const variable_list all = tensors.vec();
    const std::vector<at::Tensor> inputs(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(state->input_count));
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    variable_list outputs = state->run(inputs);
    // An input handed through would be returned twice over the same memory; a view of it keeps autograd's books straight.
    for (at::Tensor& output : outputs) {
      for (const at::Tensor& input : inputs) {
        if (input.defined() && output.is_same(input)) output = output.view_as(output);
      }
    }
    ctx->save_for_backward(all);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "[checkpoint] a gradient of a gradient (create_graph=True) cannot pass a checkpointed block. "
                "Run the block itself for that.");
    const auto capsule = ctx->saved_data["state"].toCapsule();
    auto& state = static_cast<CheckpointState&>(*capsule);
    const variable_list saved = ctx->get_saved_variables();
    const auto count = static_cast<std::ptrdiff_t>(state.input_count);

    std::vector<at::Tensor> inputs;
    for (auto it = saved.begin(); it != saved.begin() + count; ++it) {
      if (!it->defined()) {
        inputs.emplace_back();
        continue;
      }
      at::Tensor detached = it->detach();
      detached.set_requires_grad(it->requires_grad());
      inputs.push_back(std::move(detached));
    }
    std::vector<at::Tensor> outputs;
    {
      const at::AutoGradMode grad(true);
      const Restored random(state.random, RandomState(inputs));
      const Restored autocast(state.autocast, AutocastState());
      outputs = state.run(inputs);
    }
    TORCH_CHECK(outputs.size() == grads.size(), "[checkpoint] the recompute returned ", outputs.size(), " tensors, the forward ",
                grads.size(), ". A checkpointed block must compute the same thing twice.");

    // Gradients are asked for exactly the tensors that need one, and put where they belong.
    variable_list roots, root_grads, wanted;
    std::vector<size_t> slots;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !grads[i].defined()) continue;
      TORCH_CHECK(outputs[i].sizes() == grads[i].sizes(), "[checkpoint] output ", i, " of the recompute has shape ",
                  outputs[i].sizes(), ", of the forward ", grads[i].sizes(),
                  ". A checkpointed block must compute the same thing twice.");
      roots.push_back(outputs[i]);
      root_grads.push_back(grads[i]);
    }
    for (size_t i = 0; i < saved.size(); ++i) {
      if (!saved[i].defined() || !saved[i].requires_grad()) continue;
      wanted.push_back(i < state.input_count ? inputs[i] : saved[i]);
      slots.push_back(i);
    }
    variable_list result(saved.size() + 1);
    if (roots.empty() || wanted.empty()) return result;
    const variable_list found = torch::autograd::grad(roots, wanted, root_grads, /*retain_graph=*/std::nullopt,
                                                      /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < slots.size(); ++i) result[slots[i]] = found[i];
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(Run run, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> all = inputs;
  bool needs_graph = false;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad()) all.push_back(parameter);
  }
  for (const at::Tensor& tensor : all) needs_graph = needs_graph || (tensor.defined() && tensor.requires_grad());
  if (!needs_graph || !at::GradMode::is_enabled()) return run(inputs);
  auto state = c10::make_intrusive<CheckpointState>(std::move(run), inputs.size(), inputs);
  return CheckpointFunction::apply(at::TensorList(all), state);
}

}  // namespace qlorapp
