// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/causal_lm.hpp"
#include "nn/generation_cache.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/nn/generate.hpp"

using namespace qlorapp;

TEST_CASE("the model's loss and adapter gradients equal those of a plain dense model in double precision", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const Batch batch = tiny::make_batch(model.config().vocab_size);
  const auto expected = tiny::reference_loss_and_gradients(model, batch);
  model.arena().zero_grad();
  const LossSum found = model.forward_backward(batch, at::ones({}), {});
  REQUIRE(found.targets == batch.target_count);
  REQUIRE(std::abs(found.loss.item<double>() - expected.loss) < 1e-5 * expected.loss);
  for (int64_t i = 0; i < model.arena().size(); ++i) {
    REQUIRE(tiny::relative_error(model.arena().gradient(i), expected.gradients[static_cast<size_t>(i)]) < 2e-5);
  }
}

TEST_CASE("the trainer's path and the autograd path give the same bits, whatever is kept", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  CausalLM model = tiny::make_model(dtype, /*dropout=*/0.2);
  const Batch batch = tiny::make_batch(model.config().vocab_size);
  const int64_t blocks = model.config().num_hidden_layers;
  model.arena().zero_grad();
  const at::Tensor loss = model.forward_backward(batch, at::ones({}), {3, 9}).loss;
  const at::Tensor gradients = model.arena().gradients().clone();
  for (const auto& segments : {keep_in_each_block(blocks, Keep::kEverything), keep_in_each_block(blocks, Keep::kAttentionOnly),
                               keep_in_each_block(blocks, Keep::kInputOnly), checkpoint_every(blocks, 2), checkpoint_sqrt(blocks),
                               checkpoint_every(blocks, 100)}) {
    model.settings().set_segments(segments);
    model.arena().zero_grad();
    REQUIRE(at::equal(model.forward_backward(batch, at::ones({}), {3, 9}).loss, loss));
    REQUIRE(at::equal(model.arena().gradients(), gradients));
    model.arena().zero_grad();
    const at::Tensor under_autograd = model.loss(batch, 3, 9);
    REQUIRE(at::equal(under_autograd.detach(), loss));
    torch::autograd::backward({under_autograd}, {});
    REQUIRE(at::equal(model.arena().gradients(), gradients));
  }
}

TEST_CASE("gradients add up over micro-batches and scale with grad_scale", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const Batch batch = tiny::make_batch(model.config().vocab_size);
  model.arena().zero_grad();
  model.forward_backward(batch, at::ones({}), {});
  const at::Tensor once = model.arena().gradients().clone();
  model.forward_backward(batch, at::full({}, 2.0), {});
  REQUIRE(tiny::relative_error(model.arena().gradients(), once * 3) < 1e-6);
}

TEST_CASE("torch.autograd.grad and retain_graph work through the model", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const Batch batch = tiny::make_batch(model.config().vocab_size);
  const at::Tensor loss = model.loss(batch, 0, 0);
  const auto& parameters = model.arena().parameters();
  const auto first = torch::autograd::grad({loss}, parameters, {}, /*retain_graph=*/true);
  const auto second = torch::autograd::grad({loss}, parameters, {});
  for (size_t i = 0; i < first.size(); ++i) REQUIRE(at::equal(first[i], second[i]));
  REQUIRE_THROWS(torch::autograd::grad({loss}, parameters, {}));  // the graph was freed
}

TEST_CASE("adapters off is the base model; B of zero begins there", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const Batch batch = tiny::make_batch(model.config().vocab_size);
  const at::NoGradGuard no_grad;
  const at::Tensor with = model.hidden_states(batch, false, 0, 0);
  model.adapters().enable(false);
  const at::Tensor without = model.hidden_states(batch, false, 0, 0);
  model.adapters().enable(true);
  REQUIRE(at::equal(model.hidden_states(batch, false, 0, 0), with));
  REQUIRE_FALSE(at::equal(without, with));
  model.arena().values().zero_();
  REQUIRE(tiny::relative_error(model.hidden_states(batch, false, 0, 0), without) < 1e-6);
}

TEST_CASE("generation with a cache picks what the whole forward picks", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  std::vector<int64_t> text{1, 7, 3, 12};
  GenerateOptions options;
  options.max_new_tokens = 12;
  const std::vector<int64_t> generated = generate(model, text, options);
  REQUIRE(generated.size() == 12);
  for (const int64_t token : generated) {
    const auto n = static_cast<int64_t>(text.size());
    const Batch batch{at::tensor(text, at::kLong), at::full({n}, -100, at::kLong), at::arange(n, at::kLong), {0, n}, 0};
    const at::NoGradGuard no_grad;
    const at::Tensor logits = model.logits(model.hidden_states(batch, false, 0, 0).narrow(0, n - 1, 1));
    REQUIRE(logits.argmax(-1).item<int64_t>() == token);
    text.push_back(token);
  }
  options.eos_token_ids = {generated[2]};
  const auto stopped = generate(model, std::vector<int64_t>{1, 7, 3, 12}, options);
  REQUIRE(stopped.size() <= 3);
  REQUIRE(stopped.back() == generated[2]);
  REQUIRE_THROWS_AS(generate(model, std::vector<int64_t>{1, 99999}, options), ValueError);
}

TEST_CASE("prompts of several lengths generated together give what each gives alone", "[nn]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  const std::vector<std::vector<int64_t>> prompts{{1, 7, 3, 12}, {5}, {9, 9, 4, 2, 33, 8, 1}};
  GenerateOptions options;
  options.max_new_tokens = 10;
  options.sampling = {.do_sample = GENERATE(false, true), .repetition_penalty = 1.2, .seed = 4};
  std::vector<int64_t> told;
  options.on_token = [&](int64_t row, int64_t) { return told.push_back(row), true; };
  const auto together = generate(model, prompts, options);
  REQUIRE(told.size() == 30);
  REQUIRE(std::vector<int64_t>(told.begin(), told.begin() + 3) == std::vector<int64_t>{0, 1, 2});
  options.on_token = {};
  // The first row's draws are those of a row alone; a greedy choice has none.
  REQUIRE(generate(model, prompts[0], options) == together[0]);
  if (!options.sampling.do_sample) {
    for (size_t row = 1; row < prompts.size(); ++row) REQUIRE(generate(model, prompts[row], options) == together[row]);
  }
  GenerationCache cache = make_cache(model, 1, 3);
  REQUIRE_THROWS_AS(forward_cached(model, at::zeros({4}, at::TensorOptions().dtype(at::kLong).device(device)),
                                   std::vector<int64_t>{0}, std::vector<int64_t>{4}, cache),
                    ValueError);
}

TEST_CASE("segments that do not cover the blocks and targets that name nothing are refused", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  REQUIRE_THROWS_AS(model.settings().set_segments({{0, 1, Keep::kEverything}}), ValueError);
  REQUIRE_THROWS_AS(model.settings().set_segments({{1, 4, Keep::kEverything}}), ValueError);
  REQUIRE_THROWS_AS(model.add_adapters(LoraConfig{}, 0), ValueError);  // it has adapters already
}
