// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/adapter_config.hpp"

#include <cmath>
#include <string>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/adapter_use.hpp"
#include "format/expect_error.hpp"
#include "qlorapp/core/log.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

AdapterConfig parse_config(const std::string& fields) {
  return parse_adapter_config(R"({"peft_type":"LORA")" + (fields.empty() ? "" : "," + fields) + "}", "adapter_config.json");
}

std::string adapter_refusal(const std::string& fields) {
  return thrown<FormatError>([&] { (void)parse_config(fields); });
}

}  // namespace

TEST_CASE("an adapter config needs its type and nothing else", "[format][cpu]") {
  const AdapterConfig config = parse_config("");
  REQUIRE(config.r == 8);
  REQUIRE(config.lora_alpha == 8);
  REQUIRE(config.preserved.empty());
  REQUIRE(has(thrown<FormatError>([] { (void)parse_adapter_config("{}", "f"); }), "peft_type is required"));
  REQUIRE(has(thrown<FormatError>([] { (void)parse_adapter_config(R"({"peft_type":"IA3"})", "f"); }),
              "peft_type must be LORA; got \"IA3\""));
}

TEST_CASE("an adapter that cannot be what it says is refused by its key", "[format][cpu]") {
  const struct {
    const char* fields;
    const char* reason;
  } rows[] = {{R"("r":0)", "r must be an integer from 1 to 65536"},
              {R"("r":-1)", "r must be"},
              {R"("r":1000000000)", "r must be"},
              {R"("r":8.0)", "r must be an integer"},
              {R"("r":true)", "r must be an integer"},
              {R"("r":"8")", "r must be an integer"},
              {R"("lora_alpha":0)", "lora_alpha must be above 0"},
              {R"("lora_alpha":-1)", "above 0"},
              {R"("lora_alpha":NaN)", "invalid JSON"},
              {R"("lora_alpha":1e999)", "number overflow"},
              {R"("lora_alpha":"16")", "lora_alpha must be a finite number"},
              {R"("lora_dropout":1)", "lora_dropout must be in [0, 1)"},
              {R"("lora_dropout":-0.1)", "in [0, 1)"},
              {R"("target_modules":[])", "at least one module"},
              {R"("target_modules":"")", "at least one module"},
              {R"("target_modules":[1])", "target_modules must be a list of strings"},
              {R"("target_modules":{"a":1})", "target_modules must be a list"},
              {R"("rank_pattern":{"q_proj":0})", "rank_pattern.'q_proj' must be an integer from 1"},
              {R"("rank_pattern":{"q_proj":2.0})", "rank_pattern.'q_proj'"},
              {R"("rank_pattern":[])", "rank_pattern must be an object"},
              {R"("rank_pattern":{"q":18446744073709551615})", "rank_pattern.'q'"},
              {R"("alpha_pattern":{"q_proj":-1})", "alpha_pattern.'q_proj' must be a finite number above 0"},
              {R"("lora_bias":true)", "lora_bias must be false"},
              {R"("fan_in_fan_out":true)", "fan_in_fan_out must be false"},
              {R"("lora_bias":true)", "lora_bias must be false"},
              {R"("init_lora_weights":"pissa")", "init_lora_weights must be"},
              {R"("init_lora_weights":"true")", "init_lora_weights must be"},
              {R"("init_lora_weights":1)", "init_lora_weights must be"},
              {R"("loftq_config":{"loftq_bits":4})", "LoftQ changes the base weights"},
              {R"("use_rslora":1)", "use_rslora must be true or false"},
              {R"("base_model_name_or_path":3)", "must be a string"},
              {R"("r":8,"r":16)", "'r' twice"}};
  for (const auto& row : rows) {
    INFO(row.fields << "\n" << adapter_refusal(row.fields));
    REQUIRE(has(adapter_refusal(row.fields), row.reason));
  }
}

TEST_CASE("what nobody here knows is said, kept and written back", "[format][cpu]") {
  std::string said;
  set_log_sink([&](LogLevel, std::string_view line) { said += line; });
  const AdapterConfig config = parse_config(
      R"("zz_tomorrow":{"b":[1,2.5,null],"a":1e-5},"auto_mapping":{"base_model_class":"Tiny"},"qalora_group_size":32)");
  set_log_sink({});
  REQUIRE(has(said, "'zz_tomorrow'"));
  REQUIRE_FALSE(has(said, "auto_mapping"));
  const std::string text = adapter_config_json(config);
  REQUIRE(has(text, "\"zz_tomorrow\": {\n    \"a\": 1e-05,\n    \"b\": [\n      1,\n      2.5,\n      null\n    ]\n  }\n}"));
  REQUIRE(has(text, "\"base_model_class\": \"Tiny\""));
  REQUIRE(has(text, "\"qalora_group_size\": 32"));
  REQUIRE(adapter_config_json(parse_adapter_config(text, "f")) == text);
}

TEST_CASE("an unknown key that is null or false is ignored whatever it is called, any other value is not", "[format][cpu]") {
  std::string said;
  set_log_sink([&](LogLevel, std::string_view line) { said += line; });
  const AdapterConfig config = parse_config(R"("use_dorra":false,"arrow_config_2":null)");
  set_log_sink({});
  CHECK(has(said, "null or false are ignored: 'arrow_config_2', 'use_dorra'"));
  CHECK(has(adapter_config_json(config), "\"use_dorra\": false"));
  for (const char* value : {"true", "0", "\"\"", "[]"})
    CHECK(has(adapter_refusal(message("\"use_dorra\":{}", value)), "Did you mean 'use_dora'?"));
}

TEST_CASE("an adapter is merged with more than it is computed with", "[format][cpu]") {
  const auto parse = [](const std::string& fields, AdapterUse use) {
    return parse_adapter_config(message(R"({{"peft_type":"LORA",{}}})", fields), "f", use);
  };
  for (const char* key : {"lora_bias", "fan_in_fan_out"}) {
    const std::string fields = message("\"{}\":true", key);
    CHECK(parse(fields, AdapterUse::kMerge).preserved.at(key) == "true");
    CHECK(has(thrown<FormatError>([&] { (void)parse(fields, AdapterUse::kCompute); }), "Merge it with qlorapp merge"));
  }
  CHECK(
      has(thrown<FormatError>([&] { (void)parse(R"("target_parameters":["experts"])", AdapterUse::kMerge); }), "merge_and_unload"));
  CHECK(
      has(thrown<FormatError>([] { (void)parse_adapter_config(R"({"lora_parameters":{"rank":8}})", "f"); }), "adapter of mlx-lm"));
}

TEST_CASE("a config is checked before it is written, and written whole", "[format][cpu]") {
  const TemporaryFolder folder;
  AdapterConfig config;
  const struct {
    void (*change)(AdapterConfig&);
    const char* reason;
  } rows[] = {{[](AdapterConfig& c) { c.r = 0; }, "r must be from 1"},
              {[](AdapterConfig& c) { c.lora_alpha = NAN; }, "lora_alpha"},
              {[](AdapterConfig& c) { c.lora_dropout = 1; }, "lora_dropout"},
              {[](AdapterConfig& c) { c.rank_pattern["q"] = 0; }, "rank_pattern"},
              {[](AdapterConfig& c) { c.alpha_pattern["q"] = HUGE_VAL; }, "alpha_pattern"},
              {[](AdapterConfig& c) { c.init_lora_weights = "olora"; }, "init_lora_weights"},
              {[](AdapterConfig& c) {
                 c.target_modules = {"q"};
                 c.target_pattern = "q";
               },
               "got both"}};
  for (const auto& row : rows) {
    AdapterConfig wrong = config;
    row.change(wrong);
    REQUIRE(has(thrown<ValueError>([&] { save_adapter_config(wrong, folder.path()); }), row.reason));
  }
  REQUIRE(folder.entries() == 0);
  config.target_modules = {"v_proj", "q_proj"};
  save_adapter_config(config, folder.path());
  REQUIRE(load_adapter_config(folder.path()).target_modules == std::vector<std::string>{"q_proj", "v_proj"});
}
