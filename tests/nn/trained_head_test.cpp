// SPDX-License-Identifier: Apache-2.0
#include "nn/trained_head.hpp"
#include "adapters/adapter_set.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "nn/tiny_block.hpp"
#include "nn/tiny_model.hpp"
#include "ops/cross_entropy.hpp"
#include "reference/layers.hpp"

using namespace qlorapp;

TEST_CASE("a trained head's loss and gradients equal those of whole logits in double precision", "[nn][cpu]") {
  at::manual_seed(9);
  const int64_t rows = GENERATE(5, 600);  // one chunk, and several
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const at::Tensor hidden = at::randn({rows, 24}), head = at::randn({31, 24}) * 0.3;
  at::Tensor targets = at::randint(31, {rows}, at::kLong);
  targets[1] = -100;
  targets[rows - 1] = -100;

  const auto wanted = reference::linear_cross_entropy(tests::values(hidden), tests::values(head), tiny::integers(targets), 24);
  const reference::Matrix d_hidden = reference::rows(wanted.d_hidden, 24), d_head = reference::rows(wanted.d_weight, 24);

  const at::Tensor on_hidden = hidden.to(device), on_head = head.to(device), on_targets = targets.to(device);
  at::Tensor head_gradient = at::ones_like(on_head);  // added to
  const at::Tensor statistics = at::zeros({2}, on_head.options());
  const HeadPass pass =
      trained_head_pass(on_hidden, on_head, on_targets, {}, at::full({}, 0.5, on_head.options()), head_gradient, -1, statistics);
  const at::Tensor of_op = at::zeros({2}, on_head.options());
  ops::linear_cross_entropy(on_hidden, on_head, on_targets, std::nullopt, false, 512, -1, {}, of_op);
  REQUIRE(at::allclose(statistics, of_op, 1e-5, 1e-5));
  REQUIRE(std::abs(pass.loss.item<double>() - wanted.loss) < 1e-5 * wanted.loss);
  REQUIRE(tiny::relative_error(pass.grad_hidden, d_hidden * 0.5) < 2e-6);
  REQUIRE(tiny::relative_error(head_gradient - 1, d_head * 0.5) < 2e-6);

  const at::Tensor leaf_h = on_hidden.clone().requires_grad_(), leaf_w = on_head.clone().requires_grad_();
  const auto got = torch::autograd::grad({trained_head_loss(leaf_h, leaf_w, on_targets, {}) * 3}, {leaf_h, leaf_w});
  REQUIRE(tiny::relative_error(got[0], d_hidden * 3) < 2e-6);
  REQUIRE(tiny::relative_error(got[1], d_head * 3) < 2e-6);
}

TEST_CASE("with embedding, head and magnitudes in training, both paths give the same gradients", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  model.adapters().remove(kDefaultAdapter);
  LoraConfig config;
  config.target_modules = {"q_proj", "down_proj"};
  config.use_dora = true;
  config.modules_to_save = std::vector<std::string>{"embed_tokens", "lm_head"};
  model.add_adapters(config, 1);
  for (const at::Tensor& parameter : model.arena().parameters()) {
    if (parameter.dim() == 2 && parameter.size(1) == 8) parameter.detach().normal_(0, 0.1);  // B
  }
  const Batch batch = tiny::make_batch(model.config().vocab_size).to(device);
  model.arena().zero_grad();
  const at::Tensor loss = model.forward_backward(batch, at::ones({}, at::TensorOptions(device)), {}).loss;
  const at::Tensor gradients = model.arena().gradients().clone();
  REQUIRE(model.arena().gradient(model.adapters().active().embed_tokens).abs().sum().item<double>() > 0);
  model.arena().zero_grad();
  const at::Tensor under_autograd = model.loss(batch, 0, 0);
  torch::autograd::backward({under_autograd}, {});
  REQUIRE(tiny::relative_error(under_autograd, loss) < 1e-6);
  REQUIRE(tiny::relative_error(model.arena().gradients(), gradients) < 1e-6);
}
