// SPDX-License-Identifier: Apache-2.0
/// The five classes in one loop: QLoRA for a torch::nn::Module of your own, in float16 products with loss scaling.
///
/// The order: to(device) → adopt_parameters → optimizer. An arena takes the memory of the parameters, so they move to their
/// device before it; the optimizer reads the arena, so it comes after. Modules and checkpointed blocks may come at any time: adopted
/// parameters stay the same tensors. A torch::optim optimizer over model.parameters() needs no arena at all.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "qlorapp/adapters/adopt_parameters.hpp"
#include "qlorapp/nn/checkpointed_block.hpp"
#include "qlorapp/nn/lora_linear_module.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/accumulator.hpp"
#include "qlorapp/train/grad_scaler.hpp"
#include "qlorapp/train/optimizer.hpp"

namespace {

constexpr int64_t kWidth = 64, kHidden = 128, kClasses = 10;

/// 1. A frozen weight in four bits with an adapter, where a torch::nn::Linear would stand.
qlorapp::LoraLinearModule linear(int64_t in, int64_t out, uint64_t seed) {
  const at::Tensor pretrained = at::randn({out, in}) / 8;
  return qlorapp::LoraLinearModule(qlorapp::FrozenWeight(qlorapp::Quantizer().quantize(pretrained)),
                                   qlorapp::LoraLinear::Options{.r = 8, .lora_alpha = 16, .lora_dropout = 0.05}, seed);
}

struct Mlp : torch::nn::Module {
  Mlp() : up(register_module("up", linear(kWidth, kHidden, 1))), down(register_module("down", linear(kHidden, kWidth, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  qlorapp::LoraLinearModule up, down;
};

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Mlp>()));
    head = register_module("head", linear(kWidth, kClasses, 3));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = qlorapp::checkpoint(block, x);  // 2. keeps x; the rest is computed again in backward
    return head(x);
  }
  std::vector<std::shared_ptr<Mlp>> blocks;
  qlorapp::LoraLinearModule head = nullptr;
};

}  // namespace

int main() {
  at::manual_seed(0);
  Model model;
  const at::Tensor rows = at::randn({61, kWidth}).to(at::kHalf), labels = at::randint(0, kClasses, {61}, at::kLong);

  // 3. All adapters in one piece of memory, under their names: "block0.up.lora_A.weight", …; then the optimizer over it.
  qlorapp::AdapterArena arena = qlorapp::adopt_parameters(model.named_parameters());
  qlorapp::AdamW optimizer(arena, {.state = qlorapp::AdamW::State::kEightBit});
  qlorapp::GradScaler scaler({.device = at::kCPU, .init_scale = 1024.0});

  const auto loss_sum = [&](int64_t begin, int64_t count) {
    const at::Tensor logits = model.forward(rows.narrow(0, begin, count)).to(at::kFloat);
    return at::cross_entropy_loss(logits, labels.narrow(0, begin, count), {}, at::Reduction::Sum);
  };
  const auto evaluate = [&] {
    const at::NoGradGuard no_grad;
    model.eval();  // reaches the dropout of every layer
    const double loss = loss_sum(0, 61).item<double>() / 61;
    model.train();
    return loss;
  };

  const double before = evaluate();
  for (int step = 0; step < 60; ++step) {
    constexpr std::array<int64_t, 3> kMicroBatches{32, 24, 5};
    qlorapp::Accumulator accumulator(kMicroBatches);  // 4. counts the window first: ragged micro-batches equal one big batch
    arena.zero_grad();
    int64_t begin = 0;
    for (const int64_t count : kMicroBatches) {
      const at::Tensor loss = loss_sum(begin, count);
      scaler.scale(accumulator.share_of(loss)).backward();  // 5. float16 gradients are scaled, or small ones would round to zero
      begin += count;
    }
    scaler.step([&] { optimizer.step(/*learning_rate=*/1e-2); }, {arena.gradients()});  // unscales; skips an overflow
    scaler.update();
    if (step % 20 == 0) std::printf("step %2d  loss %.3f\n", step, accumulator.mean_loss().item<double>());
  }
  const double after = evaluate();
  std::printf("loss %.3f before, %.3f after; %lld trained numbers in %lld tensors\n", before, after,
              static_cast<long long>(arena.numel()), static_cast<long long>(arena.size()));
  return after < 0.2 * before && evaluate() == after ? 0 : 1;
}
