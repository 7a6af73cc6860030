// SPDX-License-Identifier: Apache-2.0
/// `quantization_config` in a config.json: says that a checkpoint's linear layers are stored in four bits.
///
/// Written with the keys that transformers 5.23 writes (BitsAndBytesConfig.to_dict(), sorted); read from any version that
/// wrote four-bit checkpoints. The block size is not among them: it stands in each tensor's quant_state.
///
/// Source: transformers `BitsAndBytesConfig`; tests/python/test_model_config.py compares with it live.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/format/dtype.hpp"
#include "qlorapp/format/nf4.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {

struct QuantizationConfig {
  QuantType quant_type = QuantType::kNf4;  ///< bnb_4bit_quant_type.
  bool double_quant = true;                ///< bnb_4bit_use_double_quant.
  Dtype compute_dtype = Dtype::kBF16;      ///< bnb_4bit_compute_dtype: F32, F16 or BF16.
  std::string storage = "uint8";           ///< bnb_4bit_quant_storage: how the packed bytes are shown; the bytes are the same.
  std::optional<std::vector<std::string>>
      skip_modules;                      ///< llm_int8_skip_modules: left in 16 bits. Empty: the reader's default (the head).
  bool enable_fp32_cpu_offload = false;  ///< llm_int8_enable_fp32_cpu_offload. No effect here; kept.
  bool has_fp16_weight = false;          ///< llm_int8_has_fp16_weight. No effect in four bits; kept.
  double threshold = 6.0;                ///< llm_int8_threshold. No effect in four bits; kept.

  bool operator==(const QuantizationConfig&) const = default;
};

/// @throws FormatError naming `where` and the key: another quant_method, load_in_8bit, an unknown key, a value out of range.
[[nodiscard]] QuantizationConfig parse_quantization_config(const Json& json, std::string_view where);

/// The object, keys sorted as transformers sorts them.
[[nodiscard]] Json quantization_config_json(const QuantizationConfig& config);

/// The text of a quantized model's config.json: the given one with `quantization_config` set, as save_pretrained formats it.
/// @param config_json  The text of the unquantized model's config.json.  @throws FormatError as parse_json().
[[nodiscard]] std::string with_quantization_config(std::string_view config_json, std::string_view where,
                                                   const QuantizationConfig& config);

}  // namespace qlorapp::format
