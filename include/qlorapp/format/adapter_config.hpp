// SPDX-License-Identifier: Apache-2.0
/// adapter_config.json: how the LoRA matrices of an adapter folder attach to their base model.
///
/// Written with all keys that PEFT 0.21 writes, sorted, indented by two, byte for byte its file for the same values
/// (target_modules sorted: PEFT writes a set in no stable order). Keys with a meaning here are fields; those that PEFT has and
/// this library does not support are refused unless they say "off"; unknown keys are kept and written back.
///
/// Source: PEFT 0.21.2 `LoraConfig`, `PeftConfigMixin.save_pretrained`; tests/python/test_adapter_config.py compares live.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::format {

inline constexpr int64_t kMaxLoraRank = 65'536;

struct AdapterConfig {
  int64_t r = 8;            ///< Rank. 1 … 65536.
  double lora_alpha = 8;    ///< Numerator of the scaling. Finite, > 0.
  double lora_dropout = 0;  ///< In [0, 1).
  bool use_rslora = false;  ///< Scaling alpha / sqrt(r) instead of alpha / r.
  /// Modules by the end of their name; or, if `target_pattern` is set, those whose whole name matches it ("all-linear" is a
  /// word of its own there). Neither: the architecture's default.
  std::vector<std::string> target_modules;
  std::optional<std::string> target_pattern;
  std::map<std::string, int64_t> rank_pattern;  ///< Module name (end or regex) → its own rank.
  std::map<std::string, double> alpha_pattern;  ///< Module name (end or regex) → its own alpha.
  std::string init_lora_weights = "true";       ///< "true", "false" or a name; only those that leave the base as it is.
  std::optional<std::string> task_type;         ///< "CAUSAL_LM" for a language model.
  std::optional<std::string> base_model_name_or_path;
  std::optional<std::string> revision;
  bool inference_mode = false;          ///< PEFT writes true when it saves a model.
  std::string peft_version = "0.21.2";  ///< Whose keys these are.
  /// Of the four-bit base that an initialization has changed, and that the adapter belongs to: 16 hexadecimal digits. This
  /// library's own key (qlorapp_base_fingerprint), written only if it is set; PEFT drops it with a warning.
  std::optional<std::string> base_fingerprint;
  /// Key → JSON text of what is kept as it was: unknown keys, and PEFT's own without effect here.
  std::map<std::string, std::string> preserved;

  /// @throws ValueError naming the field that is outside its range.
  void check() const;
};

/// @param where  Names the text in messages.  @throws FormatError naming the key.
[[nodiscard]] AdapterConfig parse_adapter_config(std::string_view json, std::string_view where);

/// Reads folder/adapter_config.json. @throws IoError, FormatError.
[[nodiscard]] AdapterConfig load_adapter_config(const std::string& folder);

/// The text of the file, without a newline at its end, as PEFT writes it. @throws ValueError as check().
[[nodiscard]] std::string adapter_config_json(const AdapterConfig& config);

/// Writes folder/adapter_config.json, whole or not at all. @throws ValueError, IoError.
void save_adapter_config(const AdapterConfig& config, const std::string& folder);

}  // namespace qlorapp::format
