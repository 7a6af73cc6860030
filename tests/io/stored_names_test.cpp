// SPDX-License-Identifier: Apache-2.0
/// Names in memory beside those that transformers writes, and names that fit nothing or two.
#include "io/stored_names.hpp"

#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;

TEST_CASE("a module's tensor is found behind other wrappers, in any order", "[io][cpu]") {
  const StoredNames names({"language_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.embed_tokens.weight",
                           "language_model.lm_head.weight", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
                           "multi_modal_projector.norm.weight", "language_model.model.norm.weight"});
  const std::vector<std::pair<std::string, std::string>> rows{
      {"model.language_model.layers.0.self_attn.q_proj.weight", "language_model.model.layers.0.self_attn.q_proj.weight"},
      {"language_model.model.layers.0.self_attn.q_proj.weight", "language_model.model.layers.0.self_attn.q_proj.weight"},
      {"model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
       "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"},
      {"lm_head.weight", "language_model.lm_head.weight"},
      {"model.language_model.norm.weight", "language_model.model.norm.weight"},
      {"model.multi_modal_projector.norm.weight", "multi_modal_projector.norm.weight"},
      {"model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"}};
  for (const auto& [name, stored] : rows) {
    INFO(name);
    REQUIRE(names.find(name) != nullptr);
    CHECK(*names.find(name) == stored);
  }
  // Another layer, another tower, another module, part of a word.
  for (const char* name :
       {"model.language_model.layers.1.self_attn.q_proj.weight", "model.audio_tower.layers.0.self_attn.q_proj.weight",
        "model.mtp.layers.0.self_attn.q_proj.weight", "model.language_model.layers.0.self_attn.k_proj.weight", "head.weight", ""})
    CHECK(names.find(name) == nullptr);
  CHECK(*StoredNames({"h.0.attn.c_attn.weight"}).find("transformer.h.0.attn.c_attn.weight") == "h.0.attn.c_attn.weight");
}

TEST_CASE("a name that fits two tensors equally well is refused with both, and the same name wins", "[io][cpu]") {
  const StoredNames names({"model.layers.0.q.weight", "transformer.layers.0.q.weight"});
  CHECK(*names.find("model.layers.0.q.weight") == "model.layers.0.q.weight");
  const std::string error = thrown<FormatError>([&] { (void)names.find("layers.0.q.weight"); });
  INFO(error);
  CHECK(has(error, "'model.layers.0.q.weight'"));
  CHECK(has(error, "'transformer.layers.0.q.weight'"));
}

TEST_CASE("numbers between dots are layers and experts; digits in words are not", "[io][cpu]") {
  CHECK(count_numbers("model.layers.3.mlp.experts.12.up_proj.weight") == 2);
  CHECK(count_numbers("vision.layer_norm1.weight") == 0);
  CHECK(split_name("model.layers.3.mlp.up_proj.weight").wrappers == "model");
  CHECK(split_name("model.layers.3.mlp.up_proj.weight").tail == "layers.3.mlp.up_proj.weight");
  CHECK(split_name("h.0.mlp.weight").wrappers.empty());
  CHECK(split_name("weight").tail == "weight");
}
