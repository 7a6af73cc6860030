// SPDX-License-Identifier: Apache-2.0
/// A model folder loads with the values that were stored, for each program that writes such folders. Errors name the damaged file and tensor.
#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "format/expect_error.hpp"
#include "format/model_folder.hpp"
#include "io/small_folders.hpp"
#include "io/tensor_file.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/save_model.hpp"
#include "reference/four_bit.hpp"

using namespace qlorapp;
using tiny::base_folder, tiny::folder_logits, tiny::folder_model, tiny::folder_tensors;

namespace {

/// Calls visit(name, weight) for each linear layer.
void each_weight(const CausalLM& model, const std::function<void(const std::string&, const FrozenWeight&)>& visit) {
  for (const format::Parameter& linear : model.decoder().linear_layers()) visit(linear.name(), model.decoder().linear(linear));
}

void check_same_codes(const CausalLM& model, const CausalLM& other) {
  std::map<std::string, QuantizedTensor> codes;
  each_weight(other, [&](const std::string& name, const FrozenWeight& weight) { codes[name] = weight.quantized; });
  each_weight(model, [&](const std::string& name, const FrozenWeight& weight) {
    INFO(name);
    REQUIRE(weight.quantized.defined());
    CHECK(at::equal(weight.quantized.packed, codes[name].packed));
    CHECK(at::equal(weight.quantized.absmax, codes[name].absmax));
    CHECK(at::equal(weight.quantized.nested_absmax, codes[name].nested_absmax));
    CHECK(at::equal(weight.quantized.nested_offset, codes[name].nested_offset));
  });
}

/// The error of load_model for the folder with changed tensors; it must be the same in 16 and in four bits.
std::string folder_refusal(const std::string& source, const std::function<void(std::map<std::string, at::Tensor>&)>& change) {
  const TemporaryFolder folder;
  auto tensors = folder_tensors(source);
  change(tensors);
  write_tensors(folder / "model.safetensors", {tensors.begin(), tensors.end()});
  std::filesystem::copy_file(source + "/config.json", folder / "config.json");
  const std::string error = thrown<FormatError>([&] { (void)folder_model(folder.path(), true); });
  INFO(error);
  CHECK(has(error, folder.path()));
  CHECK(error == thrown<FormatError>([&] { (void)folder_model(folder.path(), false); }));
  return error;
}

}  // namespace

TEST_CASE("a folder in 16 bits is loaded as it is stored, and saved with the same bytes", "[io][cpu]") {
  const CausalLM model = folder_model(base_folder().path(), /*in_4bit=*/false);
  const auto stored = folder_tensors(base_folder().path());
  each_weight(model,
              [&](const std::string& name, const FrozenWeight& weight) { REQUIRE(at::equal(weight.dense, stored.at(name))); });
  CHECK(at::equal(model.decoder().lm_head(), stored.at("lm_head.weight")));
  const TemporaryFolder saved;
  save_model(model, base_folder().path(), saved.path());
  CHECK(saved.read("model.safetensors") == base_folder().read("model.safetensors"));
  CHECK(saved.read("config.json") == base_folder().read("config.json"));
  const auto onto_itself = [&] { save_model(model, base_folder().path(), base_folder().path()); };
  CHECK(has(thrown<ValueError>(onto_itself), "is the folder that the model was loaded from"));
}

TEST_CASE("a folder loaded in four bits has the nearest codes of its weights", "[io][cpu]") {
  const CausalLM model = folder_model(base_folder().path(), /*in_4bit=*/true);
  const auto stored = folder_tensors(base_folder().path());
  for (const std::string name : {"model.layers.0.self_attn.k_proj.weight", "model.layers.2.mlp.down_proj.weight"}) {
    const at::Tensor plain = stored.at(name).to(at::kFloat).contiguous();
    const auto exact =
        reference::quantize({plain.const_data_ptr<float>(), plain.const_data_ptr<float>() + plain.numel()}, 64, reference::kNf4);
    int compared = 0;
    each_weight(model, [&](const std::string& other, const FrozenWeight& weight) {
      if (other != name) return;
      REQUIRE(weight.quantized.shape == plain.sizes().vec());
      const uint8_t* const packed = weight.quantized.packed.const_data_ptr<uint8_t>();
      int64_t wrong = 0;
      for (size_t i = 0; i < exact.codes.size(); ++i) {
        const int code = i % 2 == 0 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
        wrong += code != exact.codes[i] && exact.margin[i] > 1e-6;
      }
      CHECK(wrong == 0);
      ++compared;
    });
    REQUIRE(compared == 1);
  }
}

TEST_CASE("a folder in four bits is loaded with the codes and logits that it was written from, by every writer", "[io][cpu]") {
  const TemporaryFolder saved, quantized, again;
  CausalLM model = folder_model(base_folder().path(), /*in_4bit=*/true);
  const at::Tensor logits = folder_logits(model);
  save_model(model, base_folder().path(), saved.path());
  quantize_checkpoint(base_folder().path(), quantized / "model", {}, at::kBFloat16);
  for (const std::string& folder : {saved.path(), quantized / "model"}) {
    INFO(folder);
    CausalLM loaded = folder_model(folder, /*in_4bit=*/true);
    check_same_codes(loaded, model);
    CHECK(at::equal(folder_logits(loaded), logits));
  }
  save_model(folder_model(quantized / "model", true), quantized / "model", again.path());
  CHECK(again.read("model.safetensors") == quantized.read("model/model.safetensors"));
  CHECK(again.read("config.json") == quantized.read("model/config.json"));
  const auto twice = [&] { quantize_checkpoint(quantized / "model", quantized / "twice", {}, at::kBFloat16); };
  CHECK(has(thrown<ValueError>(twice), "is quantized already (model.layers.0."));
  CHECK_FALSE(std::filesystem::exists(quantized / "twice"));
}

TEST_CASE("a tensor that is missing, of another shape or of integers is named with its folder", "[io][cpu]") {
  const std::string base = base_folder().path(), norm = "model.norm.weight", linear = "model.layers.1.self_attn.k_proj.weight";
  for (const std::string& name : {norm, linear}) {
    CHECK(has(folder_refusal(base, [&](auto& tensors) { tensors.erase(name); }), name));
  }
  const std::string turned = folder_refusal(base, [&](auto& tensors) { tensors[linear] = tensors[linear].t().contiguous(); });
  CHECK(has(turned, "model.safetensors: tensor '" + linear + "' must have shape [128, 512] by config.json; got [512, 128]"));
  const std::string whole = folder_refusal(base, [&](auto& tensors) { tensors[norm] = tensors[norm].to(at::kInt); });
  CHECK(has(whole, "tensor 'model.norm.weight' must be float32, float16 or bfloat16; got I32"));
  const std::string bias = "model.layers.0.self_attn.q_proj.bias";
  CHECK(has(folder_refusal(base, [&](auto& tensors) { tensors[bias] = at::zeros({512}); }), "holds 1 tensor(s)"));
}

namespace {

constexpr const char *kEmbedding = "model.embed_tokens.weight", *kHead = "lm_head.weight";

/// The base folder's body under a config that ties the tables, with the tensors changed.
void write_tied(const TemporaryFolder& folder, const std::function<void(std::map<std::string, at::Tensor>&)>& change) {
  auto tensors = folder_tensors(base_folder().path());
  change(tensors);
  write_tensors(folder / "model.safetensors", {tensors.begin(), tensors.end()});
  files::write_file_atomically(folder / "config.json", small_config("bfloat16", /*tied=*/true));
}

}  // namespace

TEST_CASE("a tied config beside two tables that differ uses both, and every writer keeps both", "[io][cpu]") {
  std::vector<std::string> lines;
  const TemporaryFolder folder, saved, quantized;
  write_tied(folder, [](auto&) {});
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  CausalLM model = folder_model(folder.path(), /*in_4bit=*/false), untied = folder_model(base_folder().path(), false);
  set_log_sink({});
  REQUIRE(lines.size() == 1);
  CHECK(has(lines[0], "model.embed_tokens.weight and lm_head.weight differ"));
  CHECK(at::equal(folder_logits(model), folder_logits(untied)));
  save_model(model, folder.path(), saved.path());
  quantize_checkpoint(folder.path(), quantized / "model", {}, at::kBFloat16);
  CausalLM in_4bit = folder_model(base_folder().path(), true), again = folder_model(saved.path(), true);
  CausalLM read = folder_model(quantized / "model", true);
  CHECK(at::equal(folder_logits(again), folder_logits(in_4bit)));
  CHECK(at::equal(folder_logits(read), folder_logits(in_4bit)));
  CHECK(has(saved.read("config.json"), "\"tie_word_embeddings\": false"));
  CHECK(has(quantized.read("model/config.json"), "\"tie_word_embeddings\": false"));
  CHECK(format::computed_fields(format::settled_config(folder.path())) == format::computed_fields(model.config()));
}

TEST_CASE("a table that is stored twice is one, and one that is stored as the head alone is it", "[io][cpu]") {
  const TemporaryFolder plain, twice, head, quantized;
  write_tied(plain, [](auto& tensors) { tensors.erase(kHead); });
  write_tied(twice, [](auto& tensors) { tensors[kHead] = tensors[kEmbedding].clone(); });
  write_tied(head, [](auto& tensors) {
    tensors[kHead] = tensors[kEmbedding];
    tensors.erase(kEmbedding);
  });
  CausalLM wanted = folder_model(plain.path(), true);
  for (const TemporaryFolder* folder : {&twice, &head}) {
    CausalLM model = folder_model(folder->path(), true);
    CHECK(model.config().tie_word_embeddings);
    CHECK(at::equal(folder_logits(model), folder_logits(wanted)));
  }
  quantize_checkpoint(head.path(), quantized / "model", {}, at::kBFloat16);
  quantize_checkpoint(plain.path(), quantized / "plain", {}, at::kBFloat16);
  CHECK(quantized.read("model/model.safetensors") == quantized.read("plain/model.safetensors"));
}

TEST_CASE("files of a model without its head are read; without a tied table the missing head is named", "[io][cpu]") {
  const auto without_prefix = [](std::map<std::string, at::Tensor>& tensors) {
    std::map<std::string, at::Tensor> plain;
    for (const auto& [name, tensor] : tensors)
      if (name != kHead) plain[name.substr(6)] = tensor;
    tensors = std::move(plain);
  };
  const TemporaryFolder tied, body;
  write_tied(tied, [](auto& tensors) { tensors.erase(kHead); });
  write_tied(body, without_prefix);
  CausalLM model = folder_model(body.path(), true), wanted = folder_model(tied.path(), true);
  CHECK(at::equal(folder_logits(model), folder_logits(wanted)));
  CHECK(has(folder_refusal(base_folder().path(), without_prefix), "must hold tensor 'lm_head.weight'"));
}

TEST_CASE("a tensor that the config's model does not have is refused by name, with the way out", "[io][cpu]") {
  const std::string base = base_folder().path();
  const auto with = [&](const std::string& name) {
    return folder_refusal(base, [&](auto& tensors) { tensors[name] = at::ones({64}); });
  };
  const std::string layer = with("model.layers.3.input_layernorm.weight");
  CHECK(has(layer, "behind the 3 that config.json gives the model, up to layer 3: 'model.layers.3.input_layernorm.weight'"));
  CHECK(has(layer, "Set num_hidden_layers to the checkpoint's, 4"));
  for (const char* name :
       {"model.layers.0.self_attn.q_norm.weight", "model.layers.2.pre_feedforward_layernorm.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.self_attn.q_proj.weight.absmax", "lm_head.bias",
        "model.embed_positions.weight", "model.layers.x.input_layernorm.weight", "score.weight"}) {
    INFO(name);
    const std::string refused = with(name);
    CHECK(has(refused, "holds 1 tensor(s) that a llama model does not have, such as '" + std::string(name) + "'"));
    CHECK(has(refused, "model.safetensors"));
    CHECK(has(refused, "Use the config.json that belongs to this checkpoint"));
  }
  const TemporaryFolder folder;
  auto tensors = folder_tensors(base);
  tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = at::ones({32});
  write_tensors(folder / "model.safetensors", {tensors.begin(), tensors.end()});
  std::filesystem::copy_file(base + "/config.json", folder / "config.json");
  CHECK_NOTHROW(folder_model(folder.path(), true));
}

TEST_CASE("a value that is not finite is found in every kind of weight", "[io][cpu]") {
  const auto poison = [](const std::string& name) {
    return [name](std::map<std::string, at::Tensor>& tensors) { tensors[name].view({-1})[tensors[name].numel() - 1] = INFINITY; };
  };
  for (const char* name : {"model.norm.weight", "lm_head.weight", "model.layers.2.input_layernorm.weight"}) {
    CHECK(has(folder_refusal(base_folder().path(), poison(name)), message("'{}' must be finite", name)));
  }
  const TemporaryFolder folder;
  auto tensors = folder_tensors(base_folder().path());
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  poison(name)(tensors);
  write_tensors(folder / "model.safetensors", {tensors.begin(), tensors.end()});
  std::filesystem::copy_file(base_folder() / "config.json", folder / "config.json");
  for (const bool in_4bit : {false, true}) {
    CHECK(has(thrown<FormatError>([&] { (void)folder_model(folder.path(), in_4bit); }), "'" + name + "'"));
  }
  CHECK(has(thrown<FormatError>([&] { quantize_checkpoint(folder.path(), folder / "new", {}, at::kBFloat16); }), name));
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
}

TEST_CASE("a four-bit weight without its scales, or with another code book, is named", "[io][cpu]") {
  const TemporaryFolder folder;
  quantize_checkpoint(base_folder().path(), folder / "model", {}, at::kBFloat16);
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const auto refused = [&](const char* part, const std::function<void(at::Tensor&)>& change) {
    return folder_refusal(folder / "model", [&](auto& tensors) {
      at::Tensor& tensor = tensors.at(name + part);
      change(tensor);
      if (!tensor.defined()) tensors.erase(name + part);
    });
  };
  CHECK(has(refused(".absmax", [](at::Tensor& tensor) { tensor = at::Tensor(); }), name + ".absmax"));
  CHECK(has(refused(".absmax", [](at::Tensor& tensor) { tensor = tensor.narrow(0, 0, 7).clone(); }), name + ".absmax"));
  CHECK(has(refused(".quant_map", [](at::Tensor& tensor) { tensor[3] += 1e-3; }), "the code book of '" + name + "'"));
  CHECK(has(refused(".nested_absmax", [](at::Tensor& tensor) { tensor[0] = NAN; }), name + ".nested_absmax' must be finite"));
}

TEST_CASE("a damaged header, a file that is cut off and a folder without weights are refused by the file's name", "[io][cpu]") {
  const TemporaryFolder folder;
  std::filesystem::copy_file(base_folder() / "config.json", folder / "config.json");
  const std::string bytes = base_folder().read("model.safetensors");
  const auto refused = [&](const std::string& content) {
    const std::string path = folder.write("model.safetensors", content);
    const std::string error = thrown<FormatError>([&] { (void)folder_model(folder.path(), true); });
    INFO(error);
    CHECK(has(error, path));
    return error;
  };
  CHECK(has(refused("1234567"), "header too small"));
  CHECK(has(refused(std::string(8, '\xFF') + bytes.substr(8, 1000)), "header too large"));
  CHECK(has(refused(bytes.substr(0, 500)), "invalid header length"));
  CHECK(has(refused(bytes.substr(0, 8) + "[" + bytes.substr(9)), "got an array"));
  CHECK(has(refused(bytes.substr(0, bytes.size() - 1)), "It is truncated"));
  CHECK(has(refused(bytes + "\1"), "It has bytes after its tensors"));
  std::filesystem::remove(folder / "model.safetensors");
  const std::string error = thrown<FormatError>([&] { (void)folder_model(folder.path(), true); });
  CHECK(has(error, folder.path() + "] a model folder must hold model.safetensors"));
}
