// SPDX-License-Identifier: Apache-2.0
// What a user of the five classes gets wrong: each mistake is one line of ours, where it is made.
#include <ATen/ATen.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "qlorapp/adapters/adopt_parameters.hpp"
#include "qlorapp/nn/checkpointed_block.hpp"
#include "qlorapp/nn/lora_linear.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/accumulator.hpp"
#include "qlorapp/train/grad_scaler.hpp"

using namespace qlorapp;

namespace {

struct Misuse {
  std::string what;
  std::function<void()> call;
  std::string message;  // begins so
};

FrozenWeight four_bit() { return FrozenWeight(Quantizer().quantize(at::ones({8, 16}))); }

LoraLinear layer(FrozenWeight base, at::Tensor bias = {}) { return {std::move(base), {.r = 2}, 0, std::move(bias)}; }

QuantizedTensor without_scales() {
  QuantizedTensor q = Quantizer().quantize(at::ones({8, 16}));
  q.absmax = at::Tensor();
  return q;
}

struct Identity {
  at::Tensor forward(const at::Tensor& x) const { return x; }
};

std::vector<Misuse> table() {
  const at::Tensor x = at::ones({3, 16});
  const std::array<int64_t, 1> window{4};
  const auto leaf = [](at::ScalarType type) { return at::ones({4}, type).requires_grad_(); };
  return {
      {"an undefined weight", [] { (void)Quantizer().quantize({}); },
       "[Quantizer] weight must be a float32, float16 or bfloat16 tensor; got an undefined one."},
      {"an empty QuantizedTensor", [] { (void)Quantizer().dequantize({}); },
       "[Quantizer] q must hold a weight; got an empty QuantizedTensor."},
      {"an undefined base", [] { layer(FrozenWeight(at::Tensor())); },
       "[lora_linear] base must be a weight of shape (out, in); got an undefined one."},
      {"an empty four-bit base", [] { layer(FrozenWeight(QuantizedTensor())); },
       "[lora_linear] base must be a weight of shape (out, in); got an undefined one."},
      {"a four-bit base without its scales", [] { layer(FrozenWeight(without_scales())); }, "[lora_linear] absmax is missing."},
      {"a base of one dimension", [] { layer(FrozenWeight(at::ones({8}))); },
       "[lora_linear] base must have the shape (out, in), both at least 1; got [8]."},
      {"a base of three",
       [] {
         layer(FrozenWeight(Quantizer().quantize(at::ones({2, 4, 8}))));
       },
       "[lora_linear] base must have the shape (out, in), both at least 1; got [2, 4, 8]."},
      {"a base without rows",
       [] {
         layer(FrozenWeight(at::ones({0, 8})));
       },
       "[lora_linear] base must have the shape (out, in), both at least 1; got [0, 8]."},
      {"packed bytes as a dense base",
       [] {
         layer(FrozenWeight(at::ones({8, 16}, at::kByte)));
       },
       "[lora_linear] a dense base must be floating; got Byte."},
      {"a bias of another length", [] { layer(four_bit(), at::ones({16})); },
       "[lora_linear] bias must have the shape [8]; got [16]."},
      {"a bias of two dimensions",
       [] {
         layer(four_bit(), at::ones({1, 8}));
       },
       "[lora_linear] bias must have the shape [8]; got [1, 8]."},
      {"an integer bias", [] { layer(four_bit(), at::ones({8}, at::kLong)); }, "[lora_linear] bias must be floating; got Long."},
      {"a bias elsewhere", [] { layer(four_bit(), at::ones({8}, at::kMeta)); },
       "[lora_linear] bias must be on cpu, where the base is; got meta."},
      {"an undefined input", [] { (void)layer(four_bit()).forward({}); },
       "[lora_linear] x must be a tensor; got an undefined one."},
      {"an input of another width",
       [] {
         (void)layer(four_bit()).forward(at::ones({3, 15}));
       },
       "[lora_linear] the last dimension of x must be 16; got a shape of [3, 15]."},
      {"token ids as input",
       [] {
         (void)layer(four_bit()).forward(at::ones({3, 16}, at::kLong));
       },
       "[lora_linear] x must be floating; got Long."},
      {"an input elsewhere",
       [] {
         (void)layer(four_bit()).forward(at::ones({3, 16}, at::kMeta));
       },
       "[lora_linear] x must be on cpu, where the base is; got meta."},
      {"float32 into a bfloat16 base",
       [=] {
         (void)layer(FrozenWeight(at::ones({8, 16}, at::kBFloat16))).forward(x);
       },
       "[lora_linear] x must have the dtype of the dense weight, BFloat16; got Float."},
      {"a name twice",
       [] {
         AdapterArena({{"a", {2}}, {"a", {3}}}, at::kCPU);
       },
       "[adapter] every parameter must have a name of its own; got 'a' twice."},
      {"no name",
       [] {
         AdapterArena({{"", {2}}}, at::kCPU);
       },
       "[adapter] every parameter must have a name; got an empty one."},
      {"a negative size",
       [] {
         AdapterArena({{"a", {2, -1}}}, at::kCPU);
       },
       "[adapter] 'a' must have sizes >= 0; got [2, -1]."},
      {"a half-precision leaf in an arena",
       [=] {
         (void)adopt_parameters({{"a", leaf(at::kHalf)}});
       },
       "[adapter] 'a' must be a float32 leaf to be trained in an arena; got a Half leaf."},
      {"a result in an arena",
       [=] {
         (void)adopt_parameters({{"a", leaf(at::kFloat) * 2}});
       },
       "[adapter] 'a' must be a float32 leaf to be trained in an arena; got a Float tensor that is no leaf."},
      {"one leaf twice in an arena",
       [=] {
         const at::Tensor once = leaf(at::kFloat);
         (void)adopt_parameters({{"a", once}, {"b", once}});
       },
       "[adapter] 'b' and 'a' are one tensor; name it once."},
      {"an arena of frozen weights",
       [] {
         (void)adopt_parameters({{"a", at::ones({4})}});
       },
       "[adapter] an arena must have something to train; got 1 parameters, of which none requires a gradient."},
      {"losses of each token", [=] { (void)Accumulator(window).share_of(at::ones({4})); },
       "[Accumulator] loss_sum must be one number, the sum over a micro-batch's targets; got a shape of [4]."},
      {"an undefined loss", [=] { (void)Accumulator(window).share_of({}); },
       "[Accumulator] loss_sum must be a tensor; got an undefined one."},
      {"an integer loss", [=] { Accumulator(window).add(at::ones({}, at::kLong)); },
       "[Accumulator] loss_sum must be floating; got Long."},
      {"an undefined output to scale", [] { (void)GradScaler({.device = at::kCPU}).scale(at::Tensor()); },
       "[GradScaler] outputs must be tensors; got an undefined one."},
      {"a pointer to no block", [] { CheckpointedBlock<std::shared_ptr<Identity>>(nullptr); },
       "[checkpoint] the block must exist; got an empty pointer."},
  };
}

}  // namespace

TEST_CASE("a mistake with one of the five classes is one line that names it", "[train][cpu]") {
  for (const Misuse& misuse : table()) {
    INFO(misuse.what);
    std::string found = "nothing was thrown";
    try {
      misuse.call();
    } catch (const ValueError& error) { found = error.what(); } catch (const std::exception& error) {
      found = std::string("not ours: ") + error.what();
    }
    CHECK(found.substr(0, misuse.message.size()) == misuse.message);
    CHECK(found.find('\n') == std::string::npos);
  }
}
