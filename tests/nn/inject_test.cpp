// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/inject.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <algorithm>
#include <sstream>

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "qlorapp/nn/lora_linear_module.hpp"

using namespace qlorapp;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t kPlainWidth = 32, kHidden = 48, kClasses = 5;

struct PlainMlp : torch::nn::Module {
  PlainMlp()
      : up(register_module("up", LoraLinearModule(kPlainWidth, kHidden))),
        down(register_module("down", LoraLinearModule(kHidden, kPlainWidth, false))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  LoraLinearModule up, down;
};

struct PlainModel : torch::nn::Module {
  PlainModel() {
    for (int i = 0; i < 2; ++i) blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<PlainMlp>()));
    head = register_module("head", torch::nn::Linear(kPlainWidth, kClasses));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return head(x);
  }
  std::vector<std::shared_ptr<PlainMlp>> blocks;
  torch::nn::Linear head = nullptr;
};

std::vector<std::string> trained(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad()) names.push_back(item.key());
  }
  return names;
}

std::string refusal(torch::nn::Module& model, const LoraConfig& config) {
  try {
    inject(model, config, 1);
  } catch (const ValueError& error) { return error.what(); }
  return "accepted";
}

}  // namespace

TEST_CASE("a plain LoraLinearModule is a torch::nn::Linear", "[nn][cpu]") {
  at::manual_seed(3);
  LoraLinearModule ours(kPlainWidth, kHidden);
  at::manual_seed(3);
  torch::nn::Linear theirs(kPlainWidth, kHidden);
  CHECK(at::equal(ours->weight(), theirs->weight));
  CHECK(at::equal(ours->bias(), theirs->bias));
  const at::Tensor x = at::randn({4, kPlainWidth});
  CHECK(at::equal(ours(x), theirs(x)));
  CHECK(trained(*ours) == trained(*theirs));
  std::stringstream file;
  torch::save(theirs, file);
  LoraLinearModule loaded(kPlainWidth, kHidden);
  torch::load(loaded, file);  // its parameters have torch's names
  CHECK(at::equal(loaded->weight(), theirs->weight));
  CHECK_THROWS_WITH(ours->layer(), ContainsSubstring("inject() gives it an adapter"));
}

TEST_CASE("inject begins at the quantized model, trains its adapters alone, and learns", "[nn][cpu]") {
  at::manual_seed(1);
  PlainModel model;
  const at::Tensor x = at::randn({64, kPlainWidth}), labels = at::randint(0, kClasses, {64}, at::kLong);
  std::vector<at::Tensor> expected;  // each layer's weight, quantized and dequantized
  for (const auto& block : model.blocks) {
    for (const auto* layer : {&block->up, &block->down}) {
      expected.push_back(Quantizer().dequantize(Quantizer().quantize((*layer)->weight().detach())));
    }
  }
  const at::Tensor bias = model.blocks[0]->up->bias().detach().clone();
  const std::vector<std::string> names = inject(model, LoraConfig{.r = 4, .lora_alpha = 16}, 7);
  CHECK(names == std::vector<std::string>{"block0.up", "block0.down", "block1.up", "block1.down"});
  const at::Tensor y = model.blocks[0]->up(x);
  CHECK(at::allclose(y, at::linear(x, expected[0], bias), 1e-5, 1e-6));
  const std::vector<std::string> parameters = trained(model);
  CHECK(parameters.size() == 8);
  CHECK(std::all_of(parameters.begin(), parameters.end(), [](const std::string& name) { return name.find("lora_") != name.npos; }));

  const auto loss = [&] { return at::cross_entropy_loss(model.forward(x), labels); };
  const double before = loss().item<double>();
  for (int step = 0; step < 100; ++step) {
    model.zero_grad();
    loss().backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model.parameters()) {
      if (parameter.requires_grad()) parameter.sub_(parameter.grad(), 0.05);
    }
  }
  CHECK(loss().item<double>() < 0.8 * before);
}

TEST_CASE("targets, patterns and modules_to_save of a config hold for a user's model", "[nn][cpu]") {
  PlainModel model;
  LoraConfig config{.r = 4, .target_modules = {"up"}, .lora_alpha = 8, .modules_to_save = std::vector<std::string>{"head"}};
  config.rank_pattern = {{"block1.up", 2}};
  config.use_dora = true;
  CHECK(inject(model, config, 7) == std::vector<std::string>{"block0.up", "block1.up"});
  CHECK(model.blocks[1]->up->layer().a().size(0) == 2);
  CHECK(model.blocks[1]->up->layer().scaling() == 4.0);
  CHECK(model.blocks[0]->down->is_plain());
  CHECK_FALSE(model.blocks[0]->down->weight().requires_grad());
  const std::vector<std::string> parameters = trained(model);
  CHECK(std::count(parameters.begin(), parameters.end(), "head.weight") == 1);
  CHECK(std::count(parameters.begin(), parameters.end(), "block0.up.lora_magnitude_vector") == 1);
  std::vector<std::string> saved;
  for (const auto& [name, tensor] : adapter_parameters(model)) saved.push_back(name);
  CHECK(saved == trained(model));
  CHECK(saved.size() == 8);  // A, B and magnitude of two layers; weight and bias of the head
}

TEST_CASE("an initialization from the weight leaves the layer's function as it was", "[nn][cpu]") {
  for (const char* init : {"pissa", "olora"}) {
    at::manual_seed(2);
    PlainModel model;
    const at::Tensor x = at::randn({8, kPlainWidth});
    const at::Tensor before = model.forward(x);
    LoraConfig config{.r = 4, .lora_alpha = 4};
    config.init_lora_weights = std::string(init);
    inject(model, config, 7, {.load_in_4bit = false});
    INFO(init);
    CHECK(at::allclose(model.forward(x), before, 1e-4, 1e-4));
    CHECK(model.blocks[0]->up->layer().b().abs().max().item<double>() > 0);
  }
}

TEST_CASE("inject refuses what it cannot do, and the model is as it was", "[nn][cpu]") {
  PlainModel model;
  const std::vector<std::string> before = trained(model);
  CHECK_THAT(refusal(model, {.target_modules = {"head"}}), ContainsSubstring("'head' is a torch::nn::Linear"));
  CHECK_THAT(refusal(model, {.target_modules = {"q_proj"}}), ContainsSubstring("its linear layers are [block0.up, block0.down"));
  CHECK_THAT(refusal(model, {.r = 0}), ContainsSubstring("r must be"));
  CHECK(trained(model) == before);
  inject(model, {.target_modules = {"up"}}, 1);
  CHECK_THAT(refusal(model, {.target_modules = {"up"}}), ContainsSubstring("'block0.up' has an adapter already"));
}
