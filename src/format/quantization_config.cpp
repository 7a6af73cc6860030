// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/quantization_config.hpp"

#include <algorithm>
#include <array>

#include "core/nearest_name.hpp"
#include "format/quant_state.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"

namespace qlorapp::format {
namespace {

constexpr std::array<std::string_view, 13> kKnownKeys{"_load_in_4bit",
                                                      "_load_in_8bit",
                                                      "bnb_4bit_compute_dtype",
                                                      "bnb_4bit_quant_storage",
                                                      "bnb_4bit_quant_type",
                                                      "bnb_4bit_use_double_quant",
                                                      "llm_int8_enable_fp32_cpu_offload",
                                                      "llm_int8_has_fp16_weight",
                                                      "llm_int8_skip_modules",
                                                      "llm_int8_threshold",
                                                      "load_in_4bit",
                                                      "load_in_8bit",
                                                      "quant_method"};
constexpr std::array<std::string_view, 6> kStorages{"uint8", "int8", "float16", "bfloat16", "float32", "float64"};

}  // namespace

QuantizationConfig parse_quantization_config(const Json& json, std::string_view where) {
  JsonFields fields(json, std::string(where), "quantization_config.");
  // Early versions wrote no quant_method beside load_in_4bit.
  if (const auto method = fields.text("quant_method"); method && *method != "bitsandbytes") {
    fields.fail("quant_method", "must be bitsandbytes", Json(*method),
                "Use a bitsandbytes four-bit checkpoint, or the unquantized model.");
  }
  for (const std::string_view key : {"load_in_8bit", "_load_in_8bit"}) {
    if (fields.boolean(key).value_or(false)) {
      fields.fail(key, "must be false: eight-bit weights (LLM.int8) are not supported", Json(true),
                  "Use a four-bit checkpoint, or the unquantized model.");
    }
  }
  const auto four = fields.boolean("load_in_4bit"), private_four = fields.boolean("_load_in_4bit");
  QLORAPP_CHECK_FORMAT(
      (four || private_four) && four.value_or(true) && private_four.value_or(true),
      "[{}] quantization_config.load_in_4bit must be true; it is not. Use a four-bit checkpoint, or the unquantized model.", where);

  QuantizationConfig config;
  const std::string type = fields.text("bnb_4bit_quant_type").value_or("fp4");  // transformers' defaults for absent keys
  if (type != "nf4" && type != "fp4") fields.fail("bnb_4bit_quant_type", "must be nf4 or fp4", Json(type));
  config.quant_type = type == "nf4" ? QuantType::kNf4 : QuantType::kFp4;
  config.double_quant = fields.boolean("bnb_4bit_use_double_quant").value_or(false);
  const std::string dtype = fields.text("bnb_4bit_compute_dtype").value_or("float32");
  const auto compute_dtype = weight_dtype_from_torch_name(dtype);
  if (!compute_dtype) fields.fail("bnb_4bit_compute_dtype", "must be float32, float16 or bfloat16", Json(dtype));
  config.compute_dtype = *compute_dtype;
  config.storage = fields.text("bnb_4bit_quant_storage").value_or("uint8");
  if (std::find(kStorages.begin(), kStorages.end(), config.storage) == kStorages.end()) {
    fields.fail("bnb_4bit_quant_storage", message("must be one of {}", joined(kStorages)), Json(config.storage));
  }
  config.skip_modules = fields.texts("llm_int8_skip_modules");
  config.enable_fp32_cpu_offload = fields.boolean("llm_int8_enable_fp32_cpu_offload").value_or(false);
  config.has_fp16_weight = fields.boolean("llm_int8_has_fp16_weight").value_or(false);
  config.threshold = fields.number("llm_int8_threshold").value_or(6.0);
  const auto unknown = fields.remaining();
  QLORAPP_CHECK_FORMAT(unknown.empty(), "[{}] unknown key {} in quantization_config.{}", where, printable(unknown.front()),
                       did_you_mean(unknown.front(), kKnownKeys));
  return config;
}

Json quantization_config_json(const QuantizationConfig& config) {
  Json json = Json::object();
  json["_load_in_4bit"] = true;
  json["_load_in_8bit"] = false;
  json["bnb_4bit_compute_dtype"] = torch_name(config.compute_dtype);
  json["bnb_4bit_quant_storage"] = config.storage;
  json["bnb_4bit_quant_type"] = bitsandbytes_name(config.quant_type);
  json["bnb_4bit_use_double_quant"] = config.double_quant;
  json["llm_int8_enable_fp32_cpu_offload"] = config.enable_fp32_cpu_offload;
  json["llm_int8_has_fp16_weight"] = config.has_fp16_weight;
  json["llm_int8_skip_modules"] = config.skip_modules ? Json(*config.skip_modules) : Json(nullptr);
  json["llm_int8_threshold"] = config.threshold;
  json["load_in_4bit"] = true;
  json["load_in_8bit"] = false;
  json["quant_method"] = "bitsandbytes";
  return json;
}

std::string with_quantization_config(std::string_view config_json, std::string_view where, const QuantizationConfig& config) {
  Json json = parse_json(config_json, where, {.allow_nonfinite = true});
  QLORAPP_CHECK_FORMAT(json.is_object(), "[{}] config.json must be a JSON object; got {}. Check the file.", where, shown(json));
  json["quantization_config"] = quantization_config_json(config);
  return dump_python_json(json, kConfigStyle) + "\n";
}

}  // namespace qlorapp::format
