// SPDX-License-Identifier: Apache-2.0
#include "ops/dropout.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/operator.hpp"

namespace qlorapp {
namespace {

using Schema = at::Tensor(const at::Tensor&, double, int64_t, int64_t, int64_t, int64_t);

/// Within the operator: c10's errors stay.
at::Tensor call(const at::Tensor& x, double p, int64_t seed, int64_t micro_step, int64_t site, int64_t first) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("qlorapp::seeded_dropout", "").typed<Schema>();
  return op.call(x, p, seed, micro_step, site, first);
}

/// The derivative of x · mask / (1 - p) is the same function of the gradient.
struct SeededDropout : torch::autograd::Function<SeededDropout> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, double p, int64_t seed, int64_t micro_step,
                            int64_t site, int64_t first) {
    const ops::BelowAutograd below;
    ctx->saved_data["p"] = p;
    ctx->saved_data["seed"] = seed;
    ctx->saved_data["micro_step"] = micro_step;
    ctx->saved_data["site"] = site;
    ctx->saved_data["first"] = first;
    return call(x, p, seed, micro_step, site, first);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    const auto integer = [&](const char* name) { return ctx->saved_data[name].toInt(); };
    return {
        call(grads[0], ctx->saved_data["p"].toDouble(), integer("seed"), integer("micro_step"), integer("site"), integer("first")),
        {},
        {},
        {},
        {},
        {}};
  }
};

at::Tensor seeded_dropout_autograd(const at::Tensor& x, double p, int64_t seed, int64_t micro_step, int64_t site, int64_t first) {
  return SeededDropout::apply(x, p, seed, micro_step, site, first);
}

}  // namespace

at::Tensor ops::seeded_dropout(const at::Tensor& x, double p, const DropoutKey& key) {
  static const Operator<Schema> op("qlorapp::seeded_dropout");
  return op.call(x, p, static_cast<int64_t>(key.seed), key.micro_step, key.site, static_cast<int64_t>(key.first));
}

}  // namespace qlorapp

TORCH_LIBRARY_IMPL(qlorapp, Autograd, m) { m.impl("seeded_dropout", qlorapp::seeded_dropout_autograd); }
