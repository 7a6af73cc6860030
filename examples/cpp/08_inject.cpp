// SPDX-License-Identifier: Apache-2.0
/// QLoRA for a torch::nn model of your own with one call: inject() quantizes its layers and gives them adapters.
///
///     08_inject [FOLDER]     saves the adapters as a PEFT folder there
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cstdio>
#include <string>

#include "qlorapp/adapters/adopt_parameters.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/nn/inject.hpp"
#include "qlorapp/nn/lora_linear_module.hpp"
#include "qlorapp/train/optimizer.hpp"

namespace {

constexpr int64_t kWidth = 64, kHidden = 128, kClasses = 10;

/// 1. Layers that are to be adapted are LoraLinearModules: plain linear layers until inject().
struct Model : torch::nn::Module {
  Model()
      : up(register_module("up", qlorapp::LoraLinearModule(kWidth, kHidden))),
        down(register_module("down", qlorapp::LoraLinearModule(kHidden, kWidth))),
        head(register_module("head", qlorapp::LoraLinearModule(kWidth, kClasses))) {}
  at::Tensor forward(const at::Tensor& x) { return head(x + down(at::gelu(up(x)))); }
  qlorapp::LoraLinearModule up, down, head;
};

}  // namespace

int main(int argc, char** argv) {
  at::manual_seed(0);
  Model model;  // 2. here its pretrained weights would be loaded: "up.weight", "up.bias", …
  const at::Tensor rows = at::randn({64, kWidth}), labels = at::randint(0, kClasses, {64}, at::kLong);

  // 3. Four-bit frozen weights with adapters. The head stays as it is, and is trained in full.
  const qlorapp::LoraConfig config{
      .r = 8, .target_modules = {"up", "down"}, .lora_alpha = 16, .modules_to_save = std::vector<std::string>{"head"}};
  for (const std::string& name : qlorapp::inject(model, config, /*seed=*/1)) std::printf("adapted %s\n", name.c_str());

  // 4. The parameters that require a gradient, in one piece of memory; any torch::optim optimizer works, too.
  qlorapp::AdapterArena arena = qlorapp::adopt_parameters(model.named_parameters());
  qlorapp::AdamW optimizer(arena, {});
  const auto loss = [&] { return at::cross_entropy_loss(model.forward(rows), labels); };
  const double before = loss().item<double>();
  for (int step = 0; step < 40; ++step) {
    arena.zero_grad();
    loss().backward();
    optimizer.step(/*learning_rate=*/1e-2);
  }
  const double after = loss().item<double>();
  std::printf("loss %.3f before, %.3f after; %lld trained numbers\n", before, after, static_cast<long long>(arena.numel()));

  // 5. A PEFT folder: adapter_model.safetensors and adapter_config.json.
  if (argc > 1) qlorapp::save_adapter(qlorapp::adapter_parameters(model), config, argv[1], "my-model");
  return after < 0.2 * before ? 0 : 1;
}
