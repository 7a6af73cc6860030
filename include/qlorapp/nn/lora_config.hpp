// SPDX-License-Identifier: Apache-2.0
/// Which linear layers get a low-rank adapter, and of what rank and weight. PEFT's names, defaults and matching rules.
///
///     y = x·Wᵀ + scaling · drop(x)·Aᵀ·Bᵀ        scaling = alpha / r, or alpha / √r with use_rslora
///
/// Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732 (rsLoRA); PEFT's LoraConfig and
/// check_target_module_exists, with which tests/python/test_lora_config.py compares the matching live.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/names_or_pattern.hpp"
#include "qlorapp/format/adapter_config.hpp"

namespace qlorapp {

struct LoraConfig {
  int64_t r = 8;
  NamesOrPattern target_modules;
  NamesOrPattern exclude_modules;
  double lora_alpha = 8;
  double lora_dropout = 0.0;
  bool fan_in_fan_out = false;
  std::string bias = "none";
  bool use_rslora = false;
  std::optional<std::vector<std::string>> modules_to_save;
  std::variant<bool, std::string> init_lora_weights = true;
  std::optional<std::vector<int64_t>> layers_to_transform;
  std::optional<std::vector<std::string>> layers_pattern;
  std::map<std::string, int64_t> rank_pattern;
  std::map<std::string, double> alpha_pattern;
  bool use_dora = false;
  bool lora_bias = false;
  std::optional<std::string> task_type = "CAUSAL_LM";

  static constexpr auto fields() {
    using C = LoraConfig;
    constexpr auto kRefused = FieldStatus::kRefused;
    return std::tuple{
        Field{"r", &C::r, "rank of the update; 1 … 65536"},
        Field{"target_modules", &C::target_modules,
              "a list of module names or ends of names, \"all-linear\" (every linear layer but the output head), or one regular "
              "expression for the whole name; unset: q_proj and v_proj"},
        Field{"exclude_modules", &C::exclude_modules,
              "modules to leave out of those: a list of names or ends, or one regular expression"},
        Field{"lora_alpha", &C::lora_alpha, "the update is scaled by lora_alpha / r; > 0"},
        Field{"lora_dropout", &C::lora_dropout, "share of the adapter's inputs that training zeroes; [0, 1)"},
        Field{"fan_in_fan_out", &C::fan_in_fan_out, "the base stores weights as (in, out)", kRefused,
              "the supported families store (out, in). Leave it false."},
        Field{"bias", &C::bias, "which biases train: none"},
        Field{"use_rslora", &C::use_rslora, "scale by lora_alpha / sqrt(r)"},
        Field{"modules_to_save", &C::modules_to_save, "modules to train in full", kRefused,
              "base weights stay frozen in four bits. Leave it unset."},
        Field{"init_lora_weights", &C::init_lora_weights,
              "true: A uniform in ±1/sqrt(in), B zero; \"gaussian\": A normal with deviation 1/r, B zero"},
        Field{"layers_to_transform", &C::layers_to_transform, "only the layers with these indices; needs target_modules as a list"},
        Field{"layers_pattern", &C::layers_pattern, "what stands before the index in module names, if it is not found by itself"},
        Field{"rank_pattern", &C::rank_pattern, "ranks of their own: end of a module name, or regular expression for it → rank"},
        Field{"alpha_pattern", &C::alpha_pattern,
              "alphas of their own: end of a module name, or regular expression for it → alpha"},
        Field{"use_dora", &C::use_dora, "weight-decomposed adapters", kRefused, "this version trains plain LoRA. Leave it false."},
        Field{"lora_bias", &C::lora_bias, "a bias on B", kRefused, "this version trains plain LoRA. Leave it false."},
        Field{"task_type", &C::task_type, "CAUSAL_LM"}};
  }
  static constexpr std::array<Alias, 3> aliases() {
    return {Alias{"lora_r", "r"}, Alias{"alpha", "lora_alpha"}, Alias{"lora_target_modules", "target_modules"}};
  }

  /// @throws ValueError naming the field: outside its range, at odds with another, no regular expression, or refused.
  void validate() const;

  /// Does this linear layer get an adapter? PEFT's rules: a list matches whole names and ends that begin at a dot, a string must
  /// match the whole name as a regular expression (ECMAScript's, which is Python's but for lookbehind and named groups);
  /// exclude_modules wins; layers_to_transform looks at the first number between dots, and not at names given whole.
  /// @param module_name  as in the base model: "model.layers.0.self_attn.q_proj".
  /// @param output_head  the name that "all-linear" leaves out.
  [[nodiscard]] bool matches(std::string_view module_name, std::string_view output_head = "lm_head") const;

  /// r or alpha of one module, by rank_pattern and alpha_pattern. A key matches a whole name or an end that begins at a dot.
  /// @throws ValueError if two keys match it with different values (PEFT takes the first of the file).
  [[nodiscard]] int64_t rank_of(std::string_view module_name) const;
  [[nodiscard]] double alpha_of(std::string_view module_name) const;
  [[nodiscard]] double scaling_of(std::string_view module_name) const;

  /// A begins normal, not uniform.
  [[nodiscard]] bool gaussian_init() const;

  /// Do both make the same adapters: targets, ranks and scalings? Dropout and initialization do not count.
  [[nodiscard]] bool same_shape(const LoraConfig& other) const;
};

/// The file that PEFT writes for this config; unset target_modules are spelt out. Base model and inference mode are the caller's.
[[nodiscard]] format::AdapterConfig to_adapter_config(const LoraConfig& config);
/// @throws ValueError if the file's values do not fit together.
[[nodiscard]] LoraConfig from_adapter_config(const format::AdapterConfig& config);

}  // namespace qlorapp
