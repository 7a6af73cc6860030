// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/memory_settings.hpp"
#include "adapters/lora_projection.hpp"
#include "nn/decoder.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"

#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"
#include "ops/dropout.hpp"

using namespace qlorapp;

namespace {

struct Step {
  at::Tensor loss, gradients;
};

Step step(CausalLM& model, const Batch& batch) {
  model.arena().zero_grad();
  const at::Tensor one = at::ones({}, at::TensorOptions().device(model.device()));
  Step result{model.forward_backward(batch, one, {3, 9}).loss, {}};
  result.gradients = model.arena().gradients().clone();
  return result;
}

std::vector<Keep> keeps(const std::vector<Segment>& segments) {
  std::vector<Keep> result;
  for (const Segment& segment : segments) {
    REQUIRE(segment.end == segment.begin + 1);
    result.push_back(segment.keep);
  }
  return result;
}

}  // namespace

TEST_CASE("tiles, loss chunks, workspaces and an embedding on the host change nothing but the order of sums", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const double tolerance = dtype == at::kFloat ? 2e-6 : 2e-2;
  const double dropout = GENERATE(0.0, 0.3);
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const char* const keep = GENERATE("everything", "input_only", "attention_only:1,input_on_host,everything:1");
  CausalLM model = tiny::make_model(dtype, dropout, device);
  model.settings().set_segments(parse_segments(keep, 4));
  const Batch batch = tiny::make_batch(model.config().vocab_size).to(device);
  const Step plain = step(model, batch);
  for (const MemorySettings& settings :
       {MemorySettings{.loss_chunk_rows = 5}, MemorySettings{.mlp_tile_rows = 8}, MemorySettings{.mlp_tile_rows = 20},
        MemorySettings{.weight_workspace = WeightWorkspace::kStack}, MemorySettings{.embedding_on_host = true},
        MemorySettings{7, 4, WeightWorkspace::kProjection, true}}) {
    model.settings().set_memory(settings);
    const Step less = step(model, batch);
    // Products of other shapes add up in another order, on GPUs and on CPUs without AVX-512: an ulp of the float32 loss.
    REQUIRE(tiny::relative_error(less.loss, plain.loss) < 1e-1 * tolerance);
    REQUIRE(tiny::relative_error(less.gradients, plain.gradients) < tolerance);
    REQUIRE(at::equal(step(model, batch).gradients, less.gradients));
    model.arena().zero_grad();
    const at::Tensor loss = model.loss(batch, 3, 9);
    REQUIRE(at::equal(loss.detach(), less.loss));
    torch::autograd::backward({loss}, {});
    REQUIRE(at::equal(model.arena().gradients(), less.gradients));
  }
  model.settings().set_memory({});
  REQUIRE(at::equal(step(model, batch).gradients, plain.gradients));
}

TEST_CASE("a tiled model's loss and gradients equal those of a plain dense model in double precision", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const Batch batch = tiny::make_batch(model.config().vocab_size);
  const auto expected = tiny::reference_loss_and_gradients(model, batch);
  model.settings().set_segments(keep_in_each_block(4, Keep::kInputOnly));
  model.settings().set_memory({.loss_chunk_rows = 6, .mlp_tile_rows = 8});
  const Step found = step(model, batch);
  REQUIRE(std::abs(found.loss.item<double>() - expected.loss) < 1e-5 * expected.loss);
  for (int64_t i = 0; i < model.arena().size(); ++i) {
    REQUIRE(tiny::relative_error(model.arena().gradient(i), expected.gradients[static_cast<size_t>(i)]) < 2e-5);
  }
}

TEST_CASE("a stacked block in tiles gives the stacked block's values", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const auto workspace = GENERATE(WeightWorkspace::kLayer, WeightWorkspace::kStack, WeightWorkspace::kProjection);
  const Keep keep = GENERATE(Keep::kAttentionOnly, Keep::kInputOnly);
  const DecoderBlock block = tiny::on(device, tiny::make_block(at::kFloat).ours);
  StepContext context = tiny::on(device, tiny::make_context({0, 5, 6, 17}));
  context.stacked = true;
  const at::Tensor x = at::randn({17, 48}).to(device), dy = at::randn({17, 48}).to(device);
  const auto run = [&] {
    const at::NoGradGuard no_grad;
    Saved saved;
    std::vector<at::Tensor> results{block.forward(x, context, &saved, keep)};
    const DecoderBlock::Gradients gradients = tiny::zero_gradients(block);
    results.push_back(block.backward({dy, 48}, context, std::move(saved), gradients, /*need_dx=*/true).values());
    for (const LoraGradients& of : gradients) results.insert(results.end(), {of.a, of.b});
    return results;
  };
  const std::vector<at::Tensor> whole = run();
  context.memory = {.mlp_tile_rows = 4, .weight_workspace = workspace};
  const std::vector<at::Tensor> tiled = run();
  for (size_t i = 0; i < whole.size(); ++i) REQUIRE(tiny::relative_error(tiled[i], whole[i]) < 2e-6);
}

TEST_CASE("dropout of the rest of a tensor is the rest of the tensor's dropout", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const at::Tensor x = at::randn({12, 6}).to(dtype).to(device);
  const at::Tensor whole = ops::seeded_dropout(x, 0.4, {7, 1, 2});
  for (const int64_t begin : {4, 8}) {
    const at::Tensor rest = ops::seeded_dropout(x.narrow(0, begin, 12 - begin), 0.4, {7, 1, 2, static_cast<uint64_t>(begin * 6)});
    REQUIRE(at::equal(rest, whole.narrow(0, begin, 12 - begin)));
  }
  REQUIRE_THROWS_AS(ops::seeded_dropout(x, 0.4, {7, 1, 2, 6}), ValueError);
}

TEST_CASE("an embedding that waits in host memory leaves the GPU, unless the head is tied to it", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  const Bytes before = model.decoder().weight_bytes();
  model.settings().set_memory({.embedding_on_host = true});
  REQUIRE(model.decoder().embed_tokens().is_cpu());
  REQUIRE(model.device() == device);
  REQUIRE(before - model.decoder().weight_bytes() == Bytes{device.is_cpu() ? 0 : 67 * 48 * 4});
  model.settings().set_memory({});
  REQUIRE(model.decoder().embed_tokens().device() == device);
  REQUIRE(model.decoder().weight_bytes() == before);
}

TEST_CASE("a mixture of policies is read from the first block on, and one number may be left out", "[nn][cpu]") {
  using enum Keep;
  REQUIRE((keeps(parse_segments("input_only", 3)) == std::vector<Keep>{kInputOnly, kInputOnly, kInputOnly}));
  REQUIRE((keeps(parse_segments("input_on_host:1, attention_only:1,everything:2", 4)) ==
           std::vector<Keep>{kInputOnHost, kAttentionOnly, kEverything, kEverything}));
  REQUIRE((keeps(parse_segments("input_only,everything:2", 5)) ==
           std::vector<Keep>{kInputOnly, kInputOnly, kInputOnly, kEverything, kEverything}));
  REQUIRE((keeps(parse_segments("input_only,everything:2", 2)) == std::vector<Keep>{kEverything, kEverything}));
  REQUIRE(
      (keeps(parse_segments("everything,input_only,everything", 3)) == std::vector<Keep>{kEverything, kInputOnly, kEverything}));
  for (const char* const wrong :
       {"", "input", "everything:0", "everything:-1", "everything:x", "everything:2", "everything:5",
        "everything:", "everything:3,input_only", "input_only,everything,everything:1", "everything,everything,everything",
        "everything:9223372036854775807,input_only:9223372036854775807", "everything:99999999999999999999"}) {
    CAPTURE(wrong);
    const bool fits = std::string_view(wrong) == "everything:2" || std::string_view(wrong) == "everything,everything,everything";
    REQUIRE_THROWS_AS(parse_segments(wrong, fits ? 4 : 2), ValueError);
  }
}

TEST_CASE("checkpointing as it is taught has its names", "[nn][cpu]") {
  const auto same = [](const std::vector<Segment>& a, const std::vector<Segment>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const Segment& x, const Segment& y) { return x.begin == y.begin && x.end == y.end && x.keep == y.keep; });
  };
  REQUIRE(same(parse_segments("every:4", 10), {{0, 4, Keep::kInputOnly}, {4, 8, Keep::kInputOnly}, {8, 10, Keep::kInputOnly}}));
  REQUIRE(same(parse_segments("every:99", 3), {{0, 3, Keep::kInputOnly}}));
  REQUIRE(same(parse_segments("every:9223372036854775807", 3), {{0, 3, Keep::kInputOnly}}));
  REQUIRE(same(parse_segments("every:2, input_on_host", 3), {{0, 2, Keep::kInputOnHost}, {2, 3, Keep::kInputOnHost}}));
  REQUIRE(same(parse_segments("sqrt", 9), {{0, 3, Keep::kInputOnly}, {3, 6, Keep::kInputOnly}, {6, 9, Keep::kInputOnly}}));
  REQUIRE(std::ssize(parse_segments("sqrt", 32)) == 6);
  for (const char* const wrong : {"every", "every:", "every:0", "every:-2", "every:x", "every:2,everything",
                                  "every:2,input_only,input_only", "sqrt:2", "sqrt,attention_only", "input_only,every:2", "sqr"}) {
    CAPTURE(wrong);
    REQUIRE_THROWS_AS(parse_segments(wrong, 4), ValueError);
    REQUIRE_THROWS_AS(check_segments(wrong), ValueError);
  }
}

TEST_CASE("memory settings out of range are refused with their rule", "[nn][cpu]") {
  REQUIRE_THROWS_AS((MemorySettings{.loss_chunk_rows = -1}).validate(), ValueError);
  REQUIRE_THROWS_AS((MemorySettings{.mlp_tile_rows = -4}).validate(), ValueError);
  REQUIRE_THROWS_AS((MemorySettings{.mlp_tile_rows = 6}).validate(), ValueError);
  REQUIRE_THROWS_AS(parse_weight_workspace("stacks"), ValueError);
  REQUIRE((parse_weight_workspace("projection") == WeightWorkspace::kProjection));
}
