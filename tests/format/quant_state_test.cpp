// SPDX-License-Identifier: Apache-2.0
#include "format/quant_state.hpp"
#include "format/double_quant.hpp"

#include <functional>
#include <string>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

// As bitsandbytes 0.50.2 wrote it for a bf16 weight.
constexpr const char* kNested =
    R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 128], "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05220222473144531})";

std::string state_refusal(const std::string& json) {
  return thrown<FormatError>([&] { (void)parse_quant_state(json, "q_proj"); });
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

void write_model(const std::string& folder, const std::vector<TensorSpec>& specs, const std::string& json) {
  std::string content;
  write_safetensors(folder + "/model.safetensors", specs, {}, [&](const TensorEntry& entry) {
    content = has(entry.name, "quant_state") ? json : std::string(static_cast<size_t>(entry.nbytes), '\0');
    return std::as_bytes(std::span(content));
  });
}

}  // namespace

TEST_CASE("a quant state is read and written back to the same bytes", "[format][cpu]") {
  const QuantState state = parse_quant_state(kNested, "w");
  REQUIRE(state.double_quant);
  REQUIRE(state.packed_bytes() == 4096);
  REQUIRE(state.block_count() == 128);
  REQUIRE(state.nested_block_count() == 1);
  REQUIRE(quant_state_json(state) == kNested);
  const std::string plain = R"({"quant_type": "fp4", "blocksize": 4096, "dtype": "float32", "shape": [7]})";
  REQUIRE(quant_state_json(parse_quant_state(plain, "w")) == plain);
  REQUIRE(parse_quant_state(plain, "w").packed_bytes() == 4);
}

TEST_CASE("a quant state that is not exactly one is refused by its key", "[format][cpu]") {
  const struct {
    std::string json, reason;
  } rows[] = {
      {replaced(kNested, "nf4", "int8"), "quant_type must be nf4 or fp4"},
      {replaced(kNested, ": 64,", ": 48,"), "blocksize must be a power of two"},
      {replaced(kNested, ": 64,", ": 16,"), "from 32 to 4096"},
      {replaced(kNested, ": 64,", ": -64,"), "from 32 to 4096"},
      {replaced(kNested, ": 64,", ": 64.0,"), "blocksize must be an integer"},
      {replaced(kNested, ": 64,", ": true,"), "blocksize must be an integer"},
      {replaced(kNested, "bfloat16", "float64"), "dtype must be float32, float16 or bfloat16"},
      {replaced(kNested, "bfloat16", "load"), "dtype must be"},
      {replaced(kNested, "[64, 128]", "[]"), "shape must be"},
      {replaced(kNested, "[64, 128]", "[0, 128]"), "shape must be"},
      {replaced(kNested, "[64, 128]", "[-1, 128]"), "shape must be"},
      {replaced(kNested, "[64, 128]", "[64.0, 128]"), "shape must be"},
      {replaced(kNested, "[64, 128]", "[4294967296, 4294967296]"), "shape must be"},
      {replaced(kNested, "[64, 128]", "[4611686018427387904]"), "shape must be"},
      {replaced(kNested, "[64, 128]", "null"), "shape is required"},
      {replaced(kNested, "\"float32\"", "\"float16\""), "nested_dtype must be float32"},
      {replaced(kNested, "0.05220222473144531", "1e39"), "fit in a float32"},
      {replaced(kNested, "0.05220222473144531", "NaN"), "invalid JSON"},
      {replaced(kNested, "0.05220222473144531", "\"0\""), "finite number"},
      {replaced(kNested, ", \"nested_offset\": 0.05220222473144531", ""), "nested_offset is required"},
      {replaced(kNested, "\"nested_blocksize\": 256, ", ""), "nested_blocksize is required"},
      {replaced(kNested, "}", ", \"code\": 1}"), "unknown key 'code'"},
      {replaced(kNested, "}", ", \"shape\": [1]}"), "'shape' twice"},
      {"[]", "must be a JSON object"},
      {"{}", "quant_type is required"},
  };
  for (const auto& row : rows) {
    INFO(row.json << "\n" << state_refusal(row.json));
    REQUIRE(has(state_refusal(row.json), row.reason));
  }
}

TEST_CASE("the parts of a four-bit weight must have the sizes that its shape demands", "[format][cpu]") {
  QuantState state;
  state.shape = {6, 50};  // 300 elements, 5 blocks, the last one short
  state.double_quant = true;
  state.nested_offset = 0.25F;
  const auto outcome = [&](const std::function<void(std::vector<TensorSpec>&)>& change, const std::string& json = "") {
    const TemporaryFolder folder;
    std::vector<TensorSpec> specs = quantized_tensor_specs("q.weight", state);
    change(specs);
    write_model(folder.path(), specs, json.empty() ? quant_state_json(state) : json);
    const TensorFiles files(folder.path());
    return thrown<FormatError>([&] { (void)find_quantized_weight(files, "q.weight"); });
  };
  const auto none = [](auto&) {};
  REQUIRE(outcome(none) == "nothing");
  REQUIRE(outcome([](auto& specs) { specs[0] = {"q.weight", Dtype::kBF16, {75, 1}}; }) == "nothing");  // bnb_4bit_quant_storage
  const struct {
    std::function<void(std::vector<TensorSpec>&)> change;
    const char* reason;
  } rows[] = {
      {[](auto& specs) {
         specs[0].shape = {149, 1};
       },
       "must have 150 bytes"},
      {[](auto& specs) {
         specs[0].shape = {151, 1};
       },
       "must have 150 bytes"},
      {[](auto& specs) { specs[1].shape = {4}; }, "'q.weight.absmax' must be U8 [5]"},
      {[](auto& specs) { specs[1].shape = {6}; }, "'q.weight.absmax' must be U8 [5]"},
      {[](auto& specs) { specs[1].dtype = Dtype::kF32; }, "'q.weight.absmax' must be U8 [5]"},
      {[](auto& specs) { specs[2].shape = {15}; }, "'q.weight.quant_map' must be F32 [16]"},
      {[](auto& specs) { specs[3].shape = {2}; }, "'q.weight.nested_absmax' must be F32 [1]"},
      {[](auto& specs) {
         specs[4].shape = {16, 16};
       },
       "'q.weight.nested_quant_map' must be F32 [256]"},
      {[](auto& specs) { specs[4].name = "x"; }, "must hold tensor 'q.weight.nested_quant_map'"},
      {[](auto& specs) { specs[5].name = "q.weight.quant_state.bitsandbytes__fp4"; }, "must end in quant_state.bitsandbytes__nf4"},
      {[](auto& specs) { specs[5].name = "q.weight.quant_state.bitsandbytes__nf5"; }, "must end in"},
      {[](auto& specs) { specs[5].name = "q.weight.state"; }, "must have one quant_state; 'q.weight' has 0"},
      {[](auto& specs) {
         specs.push_back({"q.weight.quant_state.bitsandbytes__fp4", Dtype::kU8, specs[5].shape});
       },
       "has 2"},
      {[](auto& specs) {
         specs.push_back({"q.weight.extra", Dtype::kU8, {1}});
       },
       "'q.weight.extra' must not exist"},
  };
  for (const auto& row : rows) {
    INFO(outcome(row.change));
    REQUIRE(has(outcome(row.change), row.reason));
  }
  // Single scales beside a state that says nothing of double quantization.
  state.double_quant = false;
  REQUIRE(outcome(none) == "nothing");
  REQUIRE(has(outcome([](auto& specs) { specs[1].dtype = Dtype::kU8; }), "must be F32 [5]"));
  REQUIRE(has(outcome([](auto& specs) {
                specs.push_back({"q.weight.nested_absmax", Dtype::kF32, {1}});
              }),
              "without double quantization"));
}
