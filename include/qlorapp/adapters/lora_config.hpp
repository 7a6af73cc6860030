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
#include <variant>
#include <vector>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/free_form.hpp"
#include "qlorapp/core/names_or_pattern.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

/// Where the values of a new adapter come from.
enum class LoraInit {
  kUniform,     ///< A uniform in ±1/sqrt(in), B zero.
  kGaussian,    ///< A normal with deviation 1/r, B zero.
  kOrthogonal,  ///< A and B random with A·B's ranks orthogonal to each other, so that B·A = 0. Even ranks only.
  kRandom,      ///< A and B uniform: the model does not begin as its base. For tests.
  kOlora,       ///< From a QR decomposition of the weight, which is taken out of the base.
  kPissa,       ///< From its largest singular values, which are taken out of the base.
  kLoftq,       ///< From the error of quantizing it.
};

struct LoraConfig {
  int64_t r = 8;
  NamesOrPattern target_modules = {};
  NamesOrPattern exclude_modules = {};
  double lora_alpha = 8;
  double lora_dropout = 0.0;
  std::string bias = "none";
  bool use_rslora = false;
  std::optional<std::vector<std::string>> modules_to_save = {};
  std::variant<bool, std::string> init_lora_weights = true;
  std::optional<std::vector<int64_t>> layers_to_transform = {};
  std::optional<std::vector<std::string>> layers_pattern = {};
  std::map<std::string, int64_t> rank_pattern = {};
  std::map<std::string, double> alpha_pattern = {};
  FreeForm loftq_config{"{}"};
  bool use_dora = false;
  bool ensure_weight_tying = false;
  std::optional<std::string> task_type = "CAUSAL_LM";
  std::string peft_type = "LORA";
  std::optional<std::string> peft_version = {};
  std::optional<std::string> base_model_name_or_path = {};
  std::optional<std::string> revision = {};
  bool inference_mode = false;

  static constexpr auto fields() {
    using C = LoraConfig;
    return FieldTable{
        Field{"r", &C::r, "rank of the update; 1 … 65536"},
        Field{"target_modules", &C::target_modules,
              "a list of module names or ends of names, \"all-linear\" (every linear layer but the output head), or one regular "
              "expression for the whole name; unset: those of the model's family, q_proj and v_proj in most"},
        Field{"exclude_modules", &C::exclude_modules,
              "modules to exclude from target_modules: a list of names or ends of names, or one regular expression"},
        Field{"lora_alpha", &C::lora_alpha, "the update is scaled by lora_alpha / r; > 0"},
        Field{"lora_dropout", &C::lora_dropout, "share of the adapter's inputs that training zeroes; [0, 1)"},
        Field{"bias", &C::bias,
              "biases of the base to train: none, all, or lora_only (layers with an adapter); the supported families have none"},
        Field{"use_rslora", &C::use_rslora, "scale by lora_alpha / sqrt(r)"},
        Field{"modules_to_save", &C::modules_to_save,
              "modules to train in full, in float32, and to save with the adapter: embed_tokens, lm_head"},
        Field{"init_lora_weights", &C::init_lora_weights,
              "true: A uniform in ±1/sqrt(in), B zero; \"gaussian\": A normal with deviation 1/r, B zero; \"orthogonal\": B·A "
              "= 0, both "
              "random; false: both random; \"loftq\": from the error of quantizing; \"pissa\", \"pissa_niter_N\", \"olora\": "
              "from the "
              "weight itself; the base keeps the rest"},
        Field{"layers_to_transform", &C::layers_to_transform, "only the layers with these indices; needs target_modules as a list"},
        Field{"layers_pattern", &C::layers_pattern, "name before the layer index in module names; unset: detected"},
        Field{"rank_pattern", &C::rank_pattern, "ranks per module: end of a module name, or regular expression for it → rank"},
        Field{"alpha_pattern", &C::alpha_pattern, "alphas per module: end of a module name, or regular expression for it → alpha"},
        Field{"loftq_config", &C::loftq_config,
              "with init_lora_weights=\"loftq\": {\"loftq_iter\": rounds of quantizing and decomposing, default 1; "
              "\"loftq_bits\": 4}"},
        Field{"use_dora", &C::use_dora, "weight-decomposed adapters: one learned magnitude per row of base plus update"},
        Field{"ensure_weight_tying", &C::ensure_weight_tying,
              "with modules_to_save and a tied head: train embedding and head as one table; false: train a separate copy of the "
              "named one"},
        Field{"task_type", &C::task_type, "CAUSAL_LM"},
        Field{"peft_type", &C::peft_type, "LORA"},
        Field{"peft_version", &C::peft_version, "PEFT version that wrote the config file"},
        Field{"base_model_name_or_path", &C::base_model_name_or_path,
              "base model named by the config file; a saved adapter names the model that it was trained on"},
        Field{"revision", &C::revision, "the base model's revision on the hub"},
        Field{"inference_mode", &C::inference_mode, "create the adapter frozen"}};
  }
  static constexpr std::array<Alias, 3> aliases() {
    return {Alias{"lora_r", "r"}, Alias{"alpha", "lora_alpha"}, Alias{"lora_target_modules", "target_modules"}};
  }

  /// @throws ValueError naming the field: outside its range, at odds with another, or no regular expression.
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
  /// alpha / r of it, or alpha / sqrt(r) with use_rslora: what the product B·A is multiplied by.
  [[nodiscard]] double scaling_of(std::string_view module_name) const;

  /// Is this module trained in full? By modules_to_save, with PEFT's rule: one of its names ends the module's.
  [[nodiscard]] bool saves(std::string_view module_name) const;
  /// "all-linear", in any case.
  [[nodiscard]] bool targets_all_linear() const;
  /// The entries of target_modules, if it is a list, that match none of these modules: a name of another family, or a
  /// misspelling.
  [[nodiscard]] std::vector<std::string> unmatched_targets(const std::vector<std::string>& module_names) const;

  /// init_lora_weights as an enumerator. validate() has refused other texts.
  [[nodiscard]] LoraInit init() const;
  /// N of "pissa_niter_N": power iterations of a randomized decomposition; none for the exact one.
  [[nodiscard]] std::optional<int64_t> pissa_iterations() const;
  /// loftq_iter.
  [[nodiscard]] int64_t loftq_rounds() const;

  /// This config with the target_modules of the model's family, where it names none.
  [[nodiscard]] LoraConfig for_model(const format::ModelConfig& model) const;
  /// The same for a model that a wrapper holds, with one regular expression for target_modules and layers_to_transform: words alone, such as
  /// "q_proj", would name layers of what reads images, too, for PEFT and for servers.
  [[nodiscard]] LoraConfig for_text_of(const format::ModelConfig& model) const;

  /// Do both make the same adapters: targets, ranks and scalings? Dropout and initialization do not count.
  [[nodiscard]] bool same_shape(const LoraConfig& other) const;
};

/// The file that PEFT writes for this config; unset target_modules are spelled out. Base model and inference mode are the caller's.
[[nodiscard]] format::AdapterConfig to_adapter_config(const LoraConfig& config);
/// @throws ValueError if the file's values do not fit together.
[[nodiscard]] LoraConfig from_adapter_config(const format::AdapterConfig& config);

}  // namespace qlorapp
