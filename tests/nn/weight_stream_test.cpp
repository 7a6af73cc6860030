// SPDX-License-Identifier: Apache-2.0
#include "nn/weight_stream.hpp"
#include "nn/decoder.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/nn/generate.hpp"

using namespace qlorapp;

namespace {

/// Loss and gradients of two micro-batches, of one under autograd, and the hidden states of an evaluation.
std::vector<at::Tensor> results_of(CausalLM& model, const Batch& batch) {
  const at::Tensor one = at::ones({}, at::TensorOptions().device(model.device()));
  std::vector<at::Tensor> results;
  model.arena().zero_grad();
  for (const uint32_t micro_step : {7, 8}) results.push_back(model.forward_backward(batch, one, {3, micro_step}).loss);
  results.push_back(model.arena().gradients().clone());
  {
    const at::NoGradGuard no_grad;
    results.push_back(model.hidden_states(batch, /*training=*/false, 0, 0));
  }
  model.arena().zero_grad();
  const at::Tensor loss = model.loss(batch, 3, 9);
  torch::autograd::backward({loss}, {});
  results.push_back(loss.detach());
  results.push_back(model.arena().gradients().clone());
  return results;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return at::equal(x, y); });
}

bool same(const FrozenWeight& a, const FrozenWeight& b) {
  if (!a.quantized.defined()) return at::equal(a.dense.cpu(), b.dense.cpu());
  const auto parts = [](const QuantizedTensor& weight) {
    std::vector<at::Tensor> tensors{weight.packed.cpu(), weight.absmax.cpu()};
    if (weight.double_quantized()) tensors.insert(tensors.end(), {weight.nested_absmax.cpu(), weight.nested_offset.cpu()});
    return tensors;
  };
  return same(parts(a.quantized), parts(b.quantized)) && a.quantized.shape == b.quantized.shape;
}

int64_t copies_of(CausalLM& model, const auto& use) {
  const int64_t before = model.decoder().weight_stream()->copies();
  use();
  return model.decoder().weight_stream()->copies() - before;
}

}  // namespace

TEST_CASE("a base in host memory gives the bits of one on the device", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const double dropout = GENERATE(0.0, 0.3);
  const char* const keep = GENERATE("everything", "input_only", "segments_of_2", "input_on_host,everything:1");
  const int64_t layers = GENERATE(1, 2, 5);
  CausalLM model = tiny::make_model(dtype, dropout, device, layers);
  if (std::string_view(keep) == "segments_of_2" && layers == 5) {
    model.settings().set_segments({{0, 2, Keep::kInputOnly}, {2, 4, Keep::kInputOnly}, {4, 5, Keep::kInputOnly}});
  } else if (std::string_view(keep) != "segments_of_2") {
    model.settings().set_segments(parse_segments(keep, layers));
  }
  const Batch batch = tiny::make_batch(model.config().vocab_size).to(device);
  const std::vector<at::Tensor> resident = results_of(model, batch);
  const Bytes on_device = model.decoder().weight_bytes();
  model.decoder().move_blocks(/*to_host=*/true);
  REQUIRE(model.decoder().weight_stream() != nullptr);
  REQUIRE(model.blocks().front().weights().projections[0].quantized.packed.is_cpu());
  REQUIRE(same(results_of(model, batch), resident));
  REQUIRE(same(results_of(model, batch), resident));  // begins where the last pass has left the places
  model.decoder().move_blocks(/*to_host=*/false);
  REQUIRE(model.decoder().weight_stream() == nullptr);
  REQUIRE(model.blocks().front().weights().projections[0].quantized.packed.device() == device);
  REQUIRE(model.decoder().weight_bytes() == on_device);
  REQUIRE(same(results_of(model, batch), resident));
}

TEST_CASE("generation from a base in host memory gives the same tokens", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device, 5);
  const std::vector<std::vector<int64_t>> prompts{{3, 1, 4, 1, 5}, {9, 2}};
  GenerateOptions options;
  options.max_new_tokens = 6;
  const auto resident = generate(model, prompts, options);
  model.decoder().move_blocks(true);
  REQUIRE(generate(model, prompts, options) == resident);
}

TEST_CASE("each pass copies every block but the two at its turn", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device, 6);
  model.settings().set_segments(parse_segments("input_only", 6));
  model.decoder().move_blocks(true);
  const Batch batch = tiny::make_batch(model.config().vocab_size).to(device);
  const at::Tensor one = at::ones({}, at::TensorOptions().device(device));
  const auto train = [&] { static_cast<void>(model.forward_backward(batch, one, {3, 7})); };
  const auto evaluate = [&] {
    const at::NoGradGuard no_grad;
    static_cast<void>(model.hidden_states(batch, /*training=*/false, 0, 0));
  };
  REQUIRE(copies_of(model, train) == 6 + 4);  // forward all, backward all but the last two
  REQUIRE(copies_of(model, train) == 4 + 4);
  REQUIRE(copies_of(model, evaluate) == 4 + 1);  // the first block again, for the next evaluation
  REQUIRE(copies_of(model, evaluate) == 5 + 1);
}

TEST_CASE("a block's weights lie in one piece, and keep their bits on the way there and back", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  DecoderBlock block = tiny::on(device, tiny::make_block(at::kFloat).ours);
  block.replace_projection(Projection::kUp, FrozenWeight(at::randn({88, 48}).to(device)));  // one that is not in four bits
  const BlockWeights before = block.weights().projections;
  block.replace_weights(block.moved(/*to_host=*/true));
  const at::Tensor piece = block.weights().piece;
  REQUIRE(piece.numel() == bytes_in_one_piece(forms_of(before)));
  for (size_t i = 0; i < before.size(); ++i) {
    const FrozenWeight& weight = block.weights().projections[i];
    REQUIRE(same(weight, before[i]));
    const at::Tensor& first = weight.quantized.defined() ? weight.quantized.packed : weight.dense;
    REQUIRE(first.is_alias_of(piece));
    REQUIRE(reinterpret_cast<uintptr_t>(first.const_data_ptr()) % 4 == 0);
    REQUIRE((static_cast<const char*>(first.const_data_ptr()) - static_cast<const char*>(piece.const_data_ptr())) % 256 == 0);
  }
  block.replace_weights(block.moved(/*to_host=*/false));
  for (size_t i = 0; i < before.size(); ++i) REQUIRE(same(block.weights().projections[i], before[i]));
  REQUIRE_FALSE(block.weights().piece.defined());
}

TEST_CASE("a weight that an initialization changes is copied again", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const char* const initialization = GENERATE("pissa", "olora", "dora");
  const auto with_adapter = [&](bool on_host) {
    CausalLM model = tiny::make_model(at::kFloat, 0, device, 3);
    const Batch batch = tiny::make_batch(model.config().vocab_size).to(device);
    if (on_host) model.decoder().move_blocks(true);
    static_cast<void>(results_of(model, batch));  // the places hold blocks of before
    LoraConfig lora = model.lora_config();
    lora.use_dora = std::string_view(initialization) == "dora";
    if (!lora.use_dora) lora.init_lora_weights = std::string(initialization);
    model.adapters().remove(kDefaultAdapter);
    model.adapters().add(lora, 11, "second");
    return results_of(model, batch);
  };
  REQUIRE(same(with_adapter(true), with_adapter(false)));
}

TEST_CASE("settings move a GPU's base to the host, and leave a CPU's", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device, 4);
  const Bytes before = model.decoder().weight_bytes();
  model.settings().set_memory({.base_on_host = true});
  REQUIRE((model.decoder().weight_stream() != nullptr) == !device.is_cpu());
  if (!device.is_cpu()) {
    REQUIRE(model.decoder().weight_bytes() < before);
    REQUIRE(model.blocks().front().weights().piece.is_pinned());
  }
  model.settings().set_memory({});
  REQUIRE(model.decoder().weight_stream() == nullptr);
  REQUIRE(model.decoder().weight_bytes() == before);
}

TEST_CASE("copies and computation on several streams of a GPU never mix two blocks", "[cuda]") {
  const std::vector<at::Device> devices = tiny::devices();
  if (devices.size() < 2) {
    WARN("no GPU here: no streams to mix");
    return;
  }
  const at::Device device = devices.back();
  const DecoderBlock::Shape shape{.hidden = 1024, .intermediate = 2816, .heads = 16, .kv_heads = 4, .head_dim = 64};
  CausalLM model = tiny::make_model(at::kBFloat16, 0, device, 8, shape);
  model.settings().set_segments(parse_segments("input_only", 8));
  const Batch batch = tiny::make_batch(model.config().vocab_size).to(device);  // few tokens: the copies are slower
  const std::vector<at::Tensor> resident = results_of(model, batch);
  model.decoder().move_blocks(true);
  const c10::impl::VirtualGuardImpl guard(device.type());
  for (int i = 0; i < 20; ++i) {
    const c10::StreamGuard own(i % 3 == 2 ? guard.getStreamFromGlobalPool(device) : guard.getStream(device));
    REQUIRE(same(results_of(model, batch), resident));
    guard.getStream(device).synchronize();
  }
}
