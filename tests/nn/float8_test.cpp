// SPDX-License-Identifier: Apache-2.0
// Training with the frozen weights in eight bits: as near to 16 bits as three mantissa bits allow, and refused where it cannot be.
#include <ATen/ATen.h>

#include <cmath>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/io/device.hpp"

using namespace qlorapp;

namespace {

/// Two blocks whose sizes eight-bit products can take.
CausalLM make_model(at::Device device, double dropout = 0, int64_t hidden = 128, at::ScalarType dtype = at::kBFloat16) {
  return tiny::make_model(dtype, dropout, device, 2, {hidden, 192, 4, 2, 32, 1e-5});
}

Batch make_batch(at::Device device, int64_t tokens = 96) {
  at::manual_seed(6);
  Batch batch;
  batch.row_starts = {0, tokens / 3, tokens};
  batch.tokens = at::randint(67, {tokens}, at::kLong);
  batch.targets = at::randint(67, {tokens}, at::kLong);
  batch.positions = at::cat({at::arange(tokens / 3, at::kLong), at::arange(tokens - tokens / 3, at::kLong)});
  batch.target_count = tokens;
  return batch.to(device);
}

/// The summed loss and the gradients of all adapters.
std::pair<double, at::Tensor> float8_step(CausalLM& model, const Batch& batch) {
  model.arena().zero_grad();
  const at::Tensor one = at::ones({}, at::TensorOptions().device(model.device()));
  const double loss = model.forward_backward(batch, one, {3, 9}).loss.item<double>();
  return {loss, model.arena().gradients().clone().to(at::kCPU)};
}

double distance(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

std::vector<at::Device> devices() {
  std::vector<at::Device> all{at::kCPU};
  if (has_gpu() && gpu_architecture(at::Device(at::kCUDA, 0)) >= 89) all.emplace_back(at::kCUDA, 0);
  return all;
}

}  // namespace

TEST_CASE("weights in eight bits change losses and gradients by as much as three mantissa bits do", "[nn][cpu][cuda]") {
  const at::Device device = GENERATE(from_range(devices()));
  const char* const keep = GENERATE("everything", "input_only", "attention_only:1,everything:1");
  CausalLM model = make_model(device);
  model.settings().set_segments(parse_segments(keep, 2));
  const Batch batch = make_batch(device);
  const auto [loss, gradients] = float8_step(model, batch);
  model.settings().set_float8(true);
  REQUIRE(model.settings().float8());
  const auto [loss8, gradients8] = float8_step(model, batch);
  INFO("loss " << loss << ", in eight bits " << loss8 << "; gradients apart by " << distance(gradients8, gradients));
  CHECK(std::abs(loss8 - loss) < 2e-2 * loss);
  CHECK(distance(gradients8, gradients) < 0.15);
  CHECK(distance(gradients8, gradients) > 1e-3);  // it is not 16 bits by another name
  const auto [again, gradients_again] = float8_step(model, batch);
  CHECK(again == loss8);
  CHECK(at::equal(gradients_again, gradients8));
  {
    const at::AutoGradMode on(true);
    const at::Tensor by_autograd = model.loss(batch, 3, 9);
    CHECK(by_autograd.item<double>() == loss8);
  }
  {
    const at::NoGradGuard no_grad;  // evaluation is in 16 bits
    const at::Tensor eight = model.hidden_states(batch, /*training=*/false, 0, 0);
    model.settings().set_float8(false);
    CHECK(at::equal(model.hidden_states(batch, /*training=*/false, 0, 0), eight));
    model.settings().set_float8(true);
  }
  {  // a weight that an initialization leaves in another's place is multiplied the same way
    DecoderBlock& block = model.blocks().front();
    block.replace_projection(Projection::kGate,
                             FrozenWeight(block.weights().projections[qlorapp::index(Projection::kGate)].quantized));
    CHECK(at::equal(float8_step(model, batch).second, gradients8));
  }
  const Batch small = make_batch(device, 48);  // few tokens: reading the weights is all, in 16 bits
  const auto [few8, few_gradients8] = float8_step(model, small);
  model.settings().set_float8(false);
  const auto [few, few_gradients] = float8_step(model, small);
  CHECK(few8 == few);
  CHECK(at::equal(few_gradients8, few_gradients));
  const auto [back, gradients_back] = float8_step(model, batch);
  CHECK(back == loss);
}

// Rounding to three mantissa bits turns a last bit of difference into an eighth where a value lies between two codes. How far two right
// runs may be apart is therefore no constant: it is as far as one goes whose activations are in 32 bits. The operators themselves are
// held to the CPU's bits in tests/python/test_float8.py.
TEST_CASE("a GPU is no farther from the CPU in eight bits than 32-bit activations are", "[nn][cuda]") {
  if (devices().size() < 2) {
    WARN("skipped: there is no GPU that multiplies eight bits");
    return;
  }
  CausalLM here = make_model(at::kCPU), there = make_model(devices().back()), wide = make_model(at::kCPU, 0, 128, at::kFloat);
  const bool in_float8 = GENERATE(false, true);
  for (CausalLM* model : {&here, &there, &wide}) model->settings().set_float8(in_float8);
  const auto [loss, gradients] = float8_step(here, make_batch(at::kCPU));
  const auto [gpu_loss, gpu_gradients] = float8_step(there, make_batch(devices().back()));
  const auto [wide_loss, wide_gradients] = float8_step(wide, make_batch(at::kCPU));
  INFO("eight bits " << in_float8 << ": loss " << loss << ", on the GPU " << gpu_loss << ", with wide activations " << wide_loss
                     << "; gradients apart by " << distance(gpu_gradients, gradients) << " and "
                     << distance(wide_gradients, gradients));
  CHECK(std::abs(gpu_loss - loss) < 5e-3 * loss);
  CHECK(distance(gpu_gradients, gradients) < distance(wide_gradients, gradients));
}

TEST_CASE("what cannot be multiplied in eight bits is refused by name", "[nn][cpu]") {
  CausalLM odd = make_model(at::kCPU, 0, 96);
  REQUIRE_THROWS_WITH(odd.settings().set_float8(true), Catch::Matchers::ContainsSubstring("[fp8] block 0") &&
                                                           Catch::Matchers::ContainsSubstring("(128, 96)") &&
                                                           Catch::Matchers::ContainsSubstring("multiples of 64"));
  REQUIRE_FALSE(odd.settings().float8());
  CausalLM mixed = make_model(at::kCPU);
  mixed.blocks().back().replace_projection(Projection::kDown, FrozenWeight(at::zeros({128, 192}, at::kBFloat16)));
  REQUIRE_THROWS_WITH(mixed.settings().set_float8(true),
                      Catch::Matchers::ContainsSubstring("[fp8] block 1") && Catch::Matchers::ContainsSubstring("not four-bit"));
  REQUIRE_FALSE(mixed.blocks().front().in_float8());
  CausalLM dropping = make_model(at::kCPU, 0.1);
  dropping.settings().set_float8(true);
  REQUIRE_THROWS_WITH(float8_step(dropping, make_batch(at::kCPU)), Catch::Matchers::ContainsSubstring("lora_dropout=0"));
}
