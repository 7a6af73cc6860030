// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "nn/saved.hpp"
#include "nn/step_context.hpp"
#include "ops/no_autocast.hpp"
#include "segments.hpp"

namespace qlorapp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What is not a tensor, carried from forward to backward.
struct SegmentState : torch::CustomClassHolder {
  std::shared_ptr<Decoder> decoder;
  Segment segment;
  std::shared_ptr<const StepContext> context;
  std::vector<DecoderBlock::Adapters> adapters;  ///< Of the forward pass: others may be active when backward comes.
  std::vector<Saved> saved;                      ///< Without its tensors, which the graph has.
};

/// Gives the segment's blocks the adapters of its forward pass, and takes them back.
class AdaptersOfForward {
 public:
  explicit AdaptersOfForward(const SegmentState& state) : state_(state), others_(state.adapters) { exchange(); }
  ~AdaptersOfForward() { exchange(); }
  AdaptersOfForward(const AdaptersOfForward&) = delete;
  AdaptersOfForward& operator=(const AdaptersOfForward&) = delete;

 private:
  void exchange() {
    for (size_t i = 0; i < others_.size(); ++i) {
      std::swap(state_.decoder->blocks()[static_cast<size_t>(state_.segment.begin) + i].adapters(), others_[i]);
    }
  }
  const SegmentState& state_;
  std::vector<DecoderBlock::Adapters> others_;
};

}  // namespace

struct SegmentFunction : torch::autograd::Function<SegmentFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList /*adapters: edges of the graph*/,
                            const c10::intrusive_ptr<SegmentState>& state) {
    std::vector<Saved> saved;
    at::Tensor y = run_segment(*state->decoder, state->segment, x, *state->context, &saved);
    variable_list list;
    for (Saved& one : saved) {
      one.for_each([&](at::Tensor& tensor) { list.push_back(std::exchange(tensor, {})); });
    }
    state->saved = std::move(saved);
    ctx->save_for_backward(std::move(list));
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const ops::NoAutocast no_autocast;
    const at::NoGradGuard no_grad;
    const auto capsule = ctx->saved_data["state"].toCapsule();
    const auto& state = static_cast<const SegmentState&>(*capsule);
    const AdaptersOfForward adapters_of_forward(state);
    const variable_list list = ctx->get_saved_variables();
    std::vector<Saved> saved = state.saved;
    size_t next = 0;
    for (Saved& one : saved) {
      one.for_each([&](at::Tensor& tensor) { tensor = list[next++]; });
    }

    variable_list result(1);
    std::vector<DecoderBlock::Gradients> gradients;
    for (const DecoderBlock::Adapters& adapters : state.adapters) {
      DecoderBlock::Gradients& own = gradients.emplace_back(adapters.size());
      for (size_t p = 0; p < adapters.size(); ++p) {
        if (!adapters[p]) continue;
        own[p] = {at::zeros_like(adapters[p]->a), at::zeros_like(adapters[p]->b)};
        result.push_back(own[p].a);
        result.push_back(own[p].b);
        if (!adapters[p]->magnitude.defined()) continue;
        own[p].magnitude = at::zeros_like(adapters[p]->magnitude);
        result.push_back(own[p].magnitude);
      }
    }
    const Wide dx = run_segment_back(*state.decoder, state.segment, {grads[0], grads[0].size(1)}, *state.context, std::move(saved),
                                     gradients, ctx->needs_input_grad(0));
    if (dx.buffer.defined()) result[0] = dx.values();
    result.emplace_back();
    return result;
  }
};

at::Tensor run_segment_autograd(const std::shared_ptr<Decoder>& decoder, const Segment& segment, const at::Tensor& x,
                                std::shared_ptr<const StepContext> context) {
  auto state = c10::make_intrusive<SegmentState>();
  state->decoder = decoder;
  state->segment = segment;
  state->context = std::move(context);
  std::vector<at::Tensor> adapters;
  for (int64_t i = segment.begin; i < segment.end; ++i) {
    for (const auto& adapter : state->adapters.emplace_back(decoder->blocks()[static_cast<size_t>(i)].adapters())) {
      if (!adapter) continue;
      adapters.push_back(adapter->a);
      adapters.push_back(adapter->b);
      if (adapter->magnitude.defined()) adapters.push_back(adapter->magnitude);
    }
  }
  return SegmentFunction::apply(x, at::TensorList(adapters), state);
}

}  // namespace qlorapp
