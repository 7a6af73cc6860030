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
  FreeForm megatron_config;
  std::string megatron_core = "megatron.core";
  FreeForm trainable_token_indices;
  FreeForm loftq_config{"{}"};
  FreeForm eva_config;
  FreeForm corda_config;
  FreeForm lora_ga_config;
  bool use_dora = false;
  FreeForm velora_config;
  std::optional<std::vector<int64_t>> alora_invocation_tokens;
  bool use_qalora = false;
  int64_t qalora_group_size = 16;
  FreeForm monteclora_config;
  FreeForm layer_replication;
  FreeForm runtime_config{R"({"ephemeral_gpu_offload":false})"};
  bool lora_bias = false;
  std::optional<std::vector<std::string>> target_parameters;
  FreeForm use_bdlora;
  FreeForm arrow_config;
  FreeForm kasa_config;
  bool ensure_weight_tying = false;
  std::optional<std::string> task_type = "CAUSAL_LM";
  std::string peft_type = "LORA";
  FreeForm auto_mapping;
  std::optional<std::string> peft_version;
  std::optional<std::string> base_model_name_or_path;
  std::optional<std::string> revision;
  bool inference_mode = false;

  static constexpr auto fields() {
    using C = LoraConfig;
    constexpr auto kRefused = FieldStatus::kRefused, kSaid = FieldStatus::kAcceptedAndSaid;
    return FieldTable{
        Field{"r", &C::r, "rank of the update; 1 … 65536"},
        Field{"target_modules", &C::target_modules,
              "a list of module names or ends of names, \"all-linear\" (every linear layer but the output head), or one regular "
              "expression for the whole name; unset: q_proj and v_proj"},
        Field{"exclude_modules", &C::exclude_modules,
              "modules to leave out of those: a list of names or ends, or one regular expression"},
        Field{"lora_alpha", &C::lora_alpha, "the update is scaled by lora_alpha / r; > 0"},
        Field{"lora_dropout", &C::lora_dropout, "share of the adapter's inputs that training zeroes; [0, 1)"},
        Field{"fan_in_fan_out", &C::fan_in_fan_out, "the base stores weights as (in, out)", kSaid,
              "the supported families store (out, in)"},
        Field{"bias", &C::bias,
              "which biases of the base train: none, all, or lora_only, those of layers with an adapter; the supported "
              "families have none"},
        Field{"use_rslora", &C::use_rslora, "scale by lora_alpha / sqrt(r)"},
        Field{"modules_to_save", &C::modules_to_save,
              "modules to train in full, in float32, and to save with the adapter: embed_tokens, lm_head"},
        Field{"init_lora_weights", &C::init_lora_weights,
              "true: A uniform in ±1/sqrt(in), B zero; \"gaussian\": A normal with deviation 1/r, B zero; \"orthogonal\": B·A "
              "= 0, both "
              "random; false: both random; \"loftq\": from the error of quantizing; \"pissa\", \"pissa_niter_N\", \"olora\": "
              "from the "
              "weight itself, of which the base keeps the rest"},
        Field{"layers_to_transform", &C::layers_to_transform, "only the layers with these indices; needs target_modules as a list"},
        Field{"layers_pattern", &C::layers_pattern, "what stands before the index in module names, if it is not found by itself"},
        Field{"rank_pattern", &C::rank_pattern, "ranks of their own: end of a module name, or regular expression for it → rank"},
        Field{"alpha_pattern", &C::alpha_pattern,
              "alphas of their own: end of a module name, or regular expression for it → alpha"},
        Field{"megatron_config", &C::megatron_config, "arguments of Megatron's parallel layers", kRefused,
              "models are of Hugging Face's layers. Leave it unset."},
        Field{"megatron_core", &C::megatron_core, "the module that Megatron is imported from", kSaid, "Megatron is not used"},
        Field{"trainable_token_indices", &C::trainable_token_indices, "rows of the embedding to train", kRefused,
              "single rows are not trained by themselves. Name embed_tokens in modules_to_save to train the table."},
        Field{"loftq_config", &C::loftq_config,
              "with init_lora_weights=\"loftq\": {\"loftq_iter\": rounds of quantizing and decomposing, 1 unless given; "
              "\"loftq_bits\": 4}"},
        Field{"eva_config", &C::eva_config, "settings of EVA", kRefused,
              "EVA decomposes activations of a data set before training. Use init_lora_weights=true, \"orthogonal\" or "
              "\"pissa\"."},
        Field{"corda_config", &C::corda_config, "settings of CorDA", kRefused,
              "CorDA decomposes covariances of a data set before training. Use init_lora_weights=\"pissa\"."},
        Field{"lora_ga_config", &C::lora_ga_config, "settings of LoRA-GA", kRefused,
              "LoRA-GA decomposes gradients of the base weights, which a four-bit base does not have. Use "
              "init_lora_weights=\"pissa\"."},
        Field{"use_dora", &C::use_dora,
              "weight-decomposed adapters: a trained magnitude for each row of the sum of base and update"},
        Field{"velora_config", &C::velora_config, "settings of VeLoRA", kRefused,
              "activations are kept whole or formed again (gradient_checkpointing). Leave it unset."},
        Field{"alora_invocation_tokens", &C::alora_invocation_tokens, "tokens from which an activated adapter counts", kRefused,
              "an adapter here counts for all tokens. Leave it unset."},
        Field{"use_qalora", &C::use_qalora, "adapters over pooled inputs, for GPTQ's bases", kRefused,
              "the base is in bitsandbytes' form. Leave it false."},
        Field{"qalora_group_size", &C::qalora_group_size, "inputs to a pool with use_qalora", kSaid, "there is no QA-LoRA here"},
        Field{"monteclora_config", &C::monteclora_config, "settings of MonteCLoRA", kRefused,
              "adapters have one value each. Leave it unset."},
        Field{"layer_replication", &C::layer_replication, "layers to stack more than once", kRefused,
              "a model has the layers of its config. Leave it unset."},
        Field{"runtime_config", &C::runtime_config, "where parts of PEFT's own code run; never saved", kSaid,
              "everything is on one device"},
        Field{"lora_bias", &C::lora_bias, "a bias on B", kRefused,
              "the supported families have no bias for it to be merged into. Leave it false."},
        Field{"target_parameters", &C::target_parameters, "bare parameters to adapt, as experts have", kRefused,
              "the supported families have linear layers only: name them in target_modules."},
        Field{"use_bdlora", &C::use_bdlora, "block-diagonal adapters", kRefused,
              "they serve several devices in inference. Leave it unset."},
        Field{"arrow_config", &C::arrow_config, "settings of Arrow routing", kRefused,
              "one adapter is active at a time. Leave it unset."},
        Field{"kasa_config", &C::kasa_config, "settings of KaSA", kRefused,
              "it changes the base weights. Use use_dora or plain LoRA."},
        Field{"ensure_weight_tying", &C::ensure_weight_tying,
              "with modules_to_save and a tied head: one table stays embedding and head; false trains the named one away from "
              "the other"},
        Field{"task_type", &C::task_type, "CAUSAL_LM"},
        Field{"peft_type", &C::peft_type, "LORA"},
        Field{"auto_mapping", &C::auto_mapping, "the class of a model that transformers does not know", kSaid,
              "families are known by config.json"},
        Field{"peft_version", &C::peft_version, "which PEFT wrote the file that the config was read from"},
        Field{"base_model_name_or_path", &C::base_model_name_or_path,
              "the base model of a config that was read; what is saved names the model that it was trained on"},
        Field{"revision", &C::revision, "the base model's revision on the hub"},
        Field{"inference_mode", &C::inference_mode, "the adapter is made frozen"}};
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

  /// Is this module trained in full? By modules_to_save, with PEFT's rule: one of its names ends the module's.
  [[nodiscard]] bool saves(std::string_view module_name) const;
  /// "all-linear", in any case.
  [[nodiscard]] bool targets_all_linear() const;
  /// The entries of target_modules, if it is a list, that match none of these modules: a name of another family, or a
  /// misspelling.
  [[nodiscard]] std::vector<std::string> unmatched_targets(const std::vector<std::string>& module_names) const;

  [[nodiscard]] LoraInit init() const;
  /// N of "pissa_niter_N": power iterations of a randomized decomposition; none for the exact one.
  [[nodiscard]] std::optional<int64_t> pissa_iterations() const;
  /// loftq_iter.
  [[nodiscard]] int64_t loftq_rounds() const;

  /// Do both make the same adapters: targets, ranks and scalings? Dropout and initialization do not count.
  [[nodiscard]] bool same_shape(const LoraConfig& other) const;
};

/// The file that PEFT writes for this config; unset target_modules are spelt out. Base model and inference mode are the caller's.
[[nodiscard]] format::AdapterConfig to_adapter_config(const LoraConfig& config);
/// @throws ValueError if the file's values do not fit together.
[[nodiscard]] LoraConfig from_adapter_config(const format::AdapterConfig& config);

}  // namespace qlorapp
