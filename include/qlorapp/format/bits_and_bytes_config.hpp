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
  bool load_in_4bit = false;
  std::optional<std::vector<std::string>> llm_int8_skip_modules;
  std::optional<std::string> bnb_4bit_compute_dtype;
  std::string bnb_4bit_quant_type = "fp4";
  bool bnb_4bit_use_double_quant = false;

  static constexpr auto fields() {
    using C = BitsAndBytesConfig;
    return FieldTable{Field{"load_in_4bit", &C::load_in_4bit, "store the linear layers in four bits"},
                      Field{"llm_int8_skip_modules", &C::llm_int8_skip_modules,
                            "modules to leave in 16 bits, by name or end of a name; unset: the output head"},
                      Field{"bnb_4bit_compute_dtype", &C::bnb_4bit_compute_dtype,
                            "float32, float16 or bfloat16: compute dtype if from_pretrained has no dtype; unset: the checkpoint's"},
                      Field{"bnb_4bit_quant_type", &C::bnb_4bit_quant_type, "nf4 or fp4; QLoRA trains on nf4"},
                      Field{"bnb_4bit_use_double_quant", &C::bnb_4bit_use_double_quant,
                            "store the scales in eight bits; saves 0.4 bits per weight"}};
  }
  static constexpr std::array<Alias, 1> aliases() { return {Alias{"_load_in_4bit", "load_in_4bit"}}; }

  /// @throws ValueError naming the option that is wrong.
  void validate() const;
};

}  // namespace qlorapp::format
