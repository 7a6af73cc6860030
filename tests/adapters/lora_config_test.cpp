// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/adapters/lora_config.hpp"

#include <cmath>
#include <string>

#include "catch.hpp"
#include "core/check.hpp"

using namespace qlorapp;

namespace {

const char* const kQuery = "model.layers.3.self_attn.q_proj";
const char* const kGate = "model.layers.3.mlp.gate_proj";

template <class Change>
std::string error_after(Change change) {
  LoraConfig config;
  change(config);
  try {
    config.validate();
  } catch (const ValueError& error) { return error.what(); }
  return "no error";
}

}  // namespace

TEST_CASE("without targets q_proj and v_proj get adapters, at every layer", "[nn][cpu]") {
  const LoraConfig config;
  REQUIRE_NOTHROW(config.validate());
  REQUIRE(config.matches(kQuery));
  REQUIRE(config.matches("model.layers.31.self_attn.v_proj"));
  REQUIRE_FALSE(config.matches("model.layers.3.self_attn.k_proj"));
  REQUIRE_FALSE(config.matches(kGate));
}

TEST_CASE("names match whole or from a dot on; strings match as a whole; all-linear leaves the head out", "[nn][cpu]") {
  LoraConfig config;
  config.target_modules = {"proj", "self_attn.q_proj"};
  REQUIRE(config.matches(kQuery));
  REQUIRE_FALSE(config.matches(kGate));
  config.target_modules = ".*\\.(q|v)_proj";
  REQUIRE(config.matches(kQuery));
  REQUIRE_FALSE(config.matches(std::string(kQuery) + ".base"));
  config.target_modules = "all-linear";
  REQUIRE(config.matches(kGate));
  REQUIRE_FALSE(config.matches("lm_head"));
  config.exclude_modules = {"q_proj"};
  REQUIRE_FALSE(config.matches(kQuery));
  REQUIRE(config.matches(kGate));
}

TEST_CASE("scaling is alpha / r, or alpha / sqrt(r), with ranks and alphas of their own", "[nn][cpu]") {
  LoraConfig config;
  config.r = 16;
  config.lora_alpha = 32;
  REQUIRE(config.scaling_of(kQuery) == 2.0);
  config.use_rslora = true;
  REQUIRE(config.scaling_of(kQuery) == 8.0);
  config.use_rslora = false;
  config.rank_pattern = {{"q_proj", 4}, {"layers\\.3\\.mlp\\..*", 64}};
  config.alpha_pattern = {{"gate_proj", 128}};
  REQUIRE(config.rank_of(kQuery) == 4);
  REQUIRE(config.scaling_of(kQuery) == 8.0);
  REQUIRE(config.rank_of(kGate) == 64);
  REQUIRE(config.scaling_of(kGate) == 2.0);
  REQUIRE(config.rank_of("model.layers.4.mlp.gate_proj") == 16);
  config.rank_pattern["3.self_attn.q_proj"] = 2;
  REQUIRE_THROWS_AS(config.rank_of(kQuery), ValueError);  // two keys disagree
}

TEST_CASE("validate names the field that is wrong", "[nn][cpu]") {
  using Catch::Matchers::ContainsSubstring;
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.r = 0; }), ContainsSubstring("r must be from 1 to 65536; got 0"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.r = 1'000'000'000; }), ContainsSubstring("r must be from 1 to 65536"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.lora_alpha = std::nan(""); }),
               ContainsSubstring("lora_alpha must be finite and above 0"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.lora_dropout = 1.0; }),
               ContainsSubstring("lora_dropout must be in [0, 1); got 1"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.bias = "some"; }),
               ContainsSubstring("bias must be 'none', 'all' or 'lora_only'; got 'some'"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.task_type = "SEQ_CLS"; }),
               ContainsSubstring("task_type must be 'CAUSAL_LM'; got 'SEQ_CLS'"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.init_lora_weights = "pissa_niter_x"; }),
               ContainsSubstring("'pissa_niter_N' or 'olora'; got 'pissa_niter_x'"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.init_lora_weights = "eva"; }),
               ContainsSubstring("'eva' is not supported: it decomposes activations"));
  REQUIRE_THAT(error_after([](LoraConfig& c) {
                 c.init_lora_weights = "orthogonal";
                 c.rank_pattern["q"] = 3;
               }),
               ContainsSubstring("needs even ranks; got 3"));
  REQUIRE_THAT(error_after([](LoraConfig& c) {
                 c.init_lora_weights = "loftq";
                 c.loftq_config.json = R"({"loftq_bits": 8})";
               }),
               ContainsSubstring("loftq_bits must be 4, as the base is; got 8"));
  REQUIRE_THAT(error_after([](LoraConfig& c) {
                 c.init_lora_weights = "pissa";
                 c.use_dora = true;
               }),
               ContainsSubstring("use_dora needs an initialization that leaves the base as it is"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.target_modules = "(q"; }),
               ContainsSubstring("target_modules must be a regular expression; got '(q'"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.rank_pattern["q"] = 0; }),
               ContainsSubstring("a rank in rank_pattern must be from 1 to 65536; 'q' has 0"));
  REQUIRE_THAT(error_after([](LoraConfig& c) {
                 c.target_modules = "all-linear";
                 c.layers_to_transform = std::vector<int64_t>{1};
               }),
               ContainsSubstring("cannot be used when `target_modules` is a str"));
  REQUIRE_THAT(error_after([](LoraConfig& c) { c.layers_pattern = std::vector<std::string>{"h"}; }),
               ContainsSubstring("`layers_to_transform` must also"));
}

TEST_CASE("a config goes into adapter_config.json and comes back", "[nn][cpu]") {
  LoraConfig config;
  config.r = 4;
  config.lora_alpha = 16;
  config.lora_dropout = 0.05;
  config.target_modules = {"v_proj", "q_proj"};
  config.exclude_modules = ".*\\.0\\..*";
  config.layers_to_transform = std::vector<int64_t>{1, 2};
  config.rank_pattern = {{"q_proj", 2}};
  config.init_lora_weights = "gaussian";
  const std::string text = format::adapter_config_json(to_adapter_config(config));
  const LoraConfig back = from_adapter_config(format::parse_adapter_config(text, "adapter_config.json"));
  REQUIRE(back.same_shape(config));
  REQUIRE(back.lora_dropout == 0.05);
  REQUIRE(back.init() == LoraInit::kGaussian);
  REQUIRE(format::adapter_config_json(to_adapter_config(back)) == text);
  config.rank_pattern["q_proj"] = 8;
  REQUIRE_FALSE(back.same_shape(config));
  REQUIRE(to_adapter_config(LoraConfig{}).target_modules == std::vector<std::string>{"q_proj", "v_proj"});
}
