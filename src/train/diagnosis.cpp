// SPDX-License-Identifier: Apache-2.0
#include "train/diagnosis.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "nn/segments.hpp"
#include "nn/step_context.hpp"

namespace qlorapp {
namespace {

/// NaN if there is one.
double largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

std::string range(at::ScalarType dtype) { return dtype == at::kHalf ? "; float16 ends at 65504" : ""; }

}  // namespace

std::string first_non_finite(CausalLM& model, std::span<const Batch> batches, uint64_t seed, uint32_t micro_step) {
  const at::NoGradGuard no_grad;
  if (!std::isfinite(largest(model.arena().values()))) return "The adapters themselves are not finite.";
  const auto count = std::ssize(model.blocks());
  for (const Batch& batch : batches) {
    const StepContext context = model.settings().context(batch, /*training=*/true, seed, micro_step++);
    at::Tensor x = model.adapters().embed(batch.tokens);
    double before = largest(x);
    if (!std::isfinite(before)) return "The embedding of a token is not finite: the model's files are damaged.";
    for (int64_t block = 0; block < count; ++block) {
      x = run_segment(model.decoder(), {.begin = block, .end = block + 1}, x, context, nullptr);
      const double after = largest(x);
      if (!std::isfinite(after)) {
        return message("Block {} of {} is the first whose output is not finite (its input reaches {:.4g}{}).", block + 1, count,
                       before, range(x.scalar_type()));
      }
      before = after;
    }
    const at::Tensor hidden = model.hidden_states(batch, /*training=*/true, seed, micro_step - 1);
    if (!std::isfinite(largest(hidden)) || !std::isfinite(model.loss_of(hidden, batch).item<double>()))
      return "All blocks are finite; the loss, computed from the last one, is not.";
  }
  return "The forward pass is finite, so the gradients overflow in the backward pass.";
}

}  // namespace qlorapp
