// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_linear_module.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <sstream>

#include "catch.hpp"
#include "core/check.hpp"
#include "qlorapp/adapters/adopt_parameters.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/nn/checkpointed_block.hpp"
#include "qlorapp/quant/quantizer.hpp"

using namespace qlorapp;

namespace {

constexpr int64_t kWidth = 64;

LoraLinearModule make_layer(uint64_t seed, const Quantizer::Options& options = {}) {
  at::manual_seed(static_cast<int64_t>(seed));
  LoraLinearModule layer(FrozenWeight(Quantizer(options).quantize(at::randn({kWidth, kWidth}) / 8)),
                         LoraLinear::Options{.r = 4, .lora_dropout = 0.5}, seed, at::randn({kWidth}));
  const at::NoGradGuard no_grad;
  layer->layer().b().normal_(0, 0.1);
  return layer;
}

/// A user's own model.
struct Model : torch::nn::Module {
  explicit Model(uint64_t seed, const Quantizer::Options& options = {})
      : up(register_module("up", make_layer(seed, options))), head(register_module("head", torch::nn::Linear(kWidth, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return head(at::tanh(up(x))); }
  LoraLinearModule up;
  torch::nn::Linear head;
};

}  // namespace

TEST_CASE("eval() and train() of a user's module reach the dropout of its LoraLinearModule", "[nn][cpu]") {
  Model model(1);
  const at::Tensor x = at::randn({5, kWidth});
  REQUIRE_FALSE(at::equal(model.forward(x), model.forward(x)));
  model.eval();
  const at::Tensor evaluated = model.forward(x);
  REQUIRE(at::equal(model.forward(x), evaluated));
  REQUIRE(at::equal(evaluated, model.head(at::tanh(model.up->layer().forward(x, false)))));
  model.train();
  REQUIRE_FALSE(at::equal(model.forward(x), model.forward(x)));
}

TEST_CASE("a LoraLinearModule has PEFT's parameter names and trains as part of a checkpointed module", "[nn][cpu]") {
  const auto model = std::make_shared<Model>(2);
  std::vector<std::string> names;
  for (const auto& item : model->named_parameters()) names.push_back(item.key());
  REQUIRE(names == std::vector<std::string>{"up.lora_A.weight", "up.lora_B.weight", "head.weight", "head.bias"});
  const at::Tensor x = at::randn({5, kWidth});
  const auto gradients = [&](bool checked) {
    at::manual_seed(3);
    return torch::autograd::grad({(checked ? checkpoint(model, x) : model->forward(x)).square().sum()}, model->parameters());
  };
  const auto expected = gradients(false), found = gradients(true);
  for (size_t i = 0; i < expected.size(); ++i) REQUIRE(at::equal(found[i], expected[i]));
}

TEST_CASE("a saved module holds every number of the frozen base, and a file of another kind is refused", "[nn][cpu]") {
  Model model(4), other(5);
  const at::Tensor x = at::randn({5, kWidth});
  model.eval();
  other.eval();
  const auto copy = [](const Model& from, Model& to) {
    std::stringstream stream;
    torch::serialize::OutputArchive out;
    from.save(out);
    out.save_to(stream);
    torch::serialize::InputArchive in;
    in.load_from(stream);
    to.load(in);
  };
  REQUIRE_FALSE(at::equal(model.forward(x), other.forward(x)));
  copy(model, other);
  REQUIRE(at::equal(model.forward(x), other.forward(x)));
  Model fp4(6, {.quant_type = QuantType::kFp4});
  REQUIRE_THROWS_WITH(copy(model, fp4), Catch::Matchers::ContainsSubstring("of another kind"));
  other.up->layer().merge();
  REQUIRE_THROWS_WITH(copy(model, other), Catch::Matchers::ContainsSubstring("unmerge it first"));
}

TEST_CASE("to(dtype) of a user's module leaves codes and adapters as they are", "[nn][cpu]") {
  Model model(7);
  model.eval();
  const at::Tensor packed = model.up->layer().base().quantized.packed.clone();
  model.to(torch::kBFloat16);
  const at::Tensor y = model.forward(at::randn({5, kWidth}).to(at::kBFloat16));
  REQUIRE(y.scalar_type() == at::kBFloat16);
  REQUIRE(at::equal(model.up->layer().base().quantized.packed, packed));
  REQUIRE(model.up->layer().a().scalar_type() == at::kFloat);
  model.to(torch::kCPU);
  REQUIRE(model.up->layer().a().is_leaf());
}

TEST_CASE("an arena adopts a module's parameters as the tensors they are", "[nn][cpu]") {
  Model model(8);
  model.eval();
  const at::Tensor x = at::randn({5, kWidth}), before = model.forward(x).detach();
  const std::vector<at::Tensor> held = model.parameters();
  model.head->bias.set_requires_grad(false);
  held[2].mutable_grad() = at::ones_like(held[2]);
  AdapterArena arena = adopt_parameters(model.named_parameters());
  REQUIRE(arena.size() == 3);  // the frozen bias is passed over
  REQUIRE(arena.entries()[0].name == "up.lora_A.weight");
  REQUIRE(at::equal(model.forward(x), before));
  REQUIRE(arena.gradient(2).sum().item<double>() == static_cast<double>(held[2].numel()));  // a gradient that was there moves along
  arena.zero_grad();
  torch::autograd::backward({model.forward(x).square().sum()}, {});
  for (size_t i = 0; i < 3; ++i) {
    REQUIRE(arena.parameter(static_cast<int64_t>(i)).is_same(held[i]));  // what a module, a block or an optimizer holds
    REQUIRE(held[i].grad().is_alias_of(arena.gradients()));
    REQUIRE(arena.gradient(static_cast<int64_t>(i)).abs().max().item<double>() > 0);
  }
  const at::NoGradGuard no_grad;
  arena.values().add_(1);
  REQUIRE_FALSE(at::equal(model.forward(x), before));
}

TEST_CASE("to(device) of a user's module moves base, bias, adapters and gradients, and refuses parts of an arena", "[nn][cuda]") {
  if (!has_gpu()) {
    WARN("no GPU here: not tested");
    return;
  }
  Model model(9);
  model.eval();
  const std::vector<at::Tensor> held = model.parameters();
  const at::Tensor x = at::randn({5, kWidth}), expected = model.forward(x).detach();
  torch::autograd::backward({model.forward(x).sum()}, {});
  model.to(torch::Device(torch::kCUDA, 0));
  REQUIRE(at::allclose(model.forward(x.cuda()).cpu(), expected, 1e-3, 1e-4));
  for (const at::Tensor& parameter : held) REQUIRE(parameter.is_cuda());
  REQUIRE(held[0].grad().is_cuda());
  REQUIRE(model.parameters()[0].is_same(held[0]));
  const AdapterArena arena = adopt_parameters(model.up->layer().named_parameters("up"));
  REQUIRE_THROWS_WITH(model.to(torch::kCPU), Catch::Matchers::ContainsSubstring("before adopt_parameters"));
}
