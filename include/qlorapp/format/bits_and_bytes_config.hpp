// SPDX-License-Identifier: Apache-2.0
/// How a person asks for four-bit layers: transformers' BitsAndBytesConfig, by name, meaning and default, in one field table.
///
/// The defaults are transformers' own, fp4 without double quantization among them; QLoRA trains on nf4 with it. What a
/// checkpoint's config.json says is format/quantization_config.hpp.
///
/// Source: transformers 5.23, 4.57 and 4.46 BitsAndBytesConfig.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "qlorapp/core/field_table.hpp"

namespace qlorapp::format {

struct BitsAndBytesConfig {
  bool load_in_8bit = false;
  bool load_in_4bit = false;
  double llm_int8_threshold = 6.0;
  std::optional<std::vector<std::string>> llm_int8_skip_modules;
  bool llm_int8_enable_fp32_cpu_offload = false;
  bool llm_int8_has_fp16_weight = false;
  std::optional<std::string> bnb_4bit_compute_dtype;
  std::string bnb_4bit_quant_type = "fp4";
  bool bnb_4bit_use_double_quant = false;
  std::optional<std::string> bnb_4bit_quant_storage;
  std::string quant_method = "bitsandbytes";

  static constexpr auto fields() {
    using C = BitsAndBytesConfig;
    constexpr auto kSaid = FieldStatus::kAcceptedAndSaid;
    constexpr auto kRefused = FieldStatus::kRefused;
    constexpr auto kEightBit = "it is about eight-bit layers, and these have four.";
    return FieldTable{
        Field{"load_in_8bit", &C::load_in_8bit, "", kRefused, "layers are stored in four bits. Use load_in_4bit=True."},
        Field{"load_in_4bit", &C::load_in_4bit, "store the linear layers in four bits"},
        Field{"llm_int8_threshold", &C::llm_int8_threshold, "", kSaid, kEightBit},
        Field{"llm_int8_skip_modules", &C::llm_int8_skip_modules,
              "modules to leave in 16 bits, by name or end of a name; unset: the output head"},
        Field{"llm_int8_enable_fp32_cpu_offload", &C::llm_int8_enable_fp32_cpu_offload, "", kSaid,
              "the model is on one device; nothing is offloaded."},
        Field{"llm_int8_has_fp16_weight", &C::llm_int8_has_fp16_weight, "", kSaid, kEightBit},
        Field{"bnb_4bit_compute_dtype", &C::bnb_4bit_compute_dtype,
              "float32, float16 or bfloat16: what layers compute in where from_pretrained has no dtype; unset: as the "
              "checkpoint"},
        Field{"bnb_4bit_quant_type", &C::bnb_4bit_quant_type, "nf4 or fp4; QLoRA trains on nf4"},
        Field{"bnb_4bit_use_double_quant", &C::bnb_4bit_use_double_quant, "store the scales in eight bits: 0.4 bit less a weight"},
        Field{"bnb_4bit_quant_storage", &C::bnb_4bit_quant_storage, "", kSaid,
              "packed bytes are held as uint8, whatever they are called; they are the same."},
        Field{"quant_method", &C::quant_method, "bitsandbytes, as in a config.json"}};
  }
  static constexpr std::array<Alias, 2> aliases() {
    return {Alias{"_load_in_4bit", "load_in_4bit"}, Alias{"_load_in_8bit", "load_in_8bit"}};
  }

  /// @throws ValueError naming the option that is wrong or refused; says once what has no effect.
  void validate() const;
};

}  // namespace qlorapp::format
