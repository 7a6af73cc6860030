// SPDX-License-Identifier: Apache-2.0
#include "model_config_keys.hpp"

#include <algorithm>
#include <iterator>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::format {
namespace {

/// Say something about training, generation, bookkeeping or the head's labels; nothing about the forward pass.
constexpr std::string_view kIgnoredKeys[] = {"use_cache",
                                             "initializer_range",
                                             "transformers_version",
                                             "return_dict",
                                             "output_attentions",
                                             "output_hidden_states",
                                             "torchscript",
                                             "use_bfloat16",
                                             "id2label",
                                             "label2id",
                                             "problem_type",
                                             "task_specific_params",
                                             "tokenizer_class",
                                             "prefix",
                                             "finetuning_task",
                                             "chunk_size_feed_forward",
                                             "sep_token_id",
                                             "decoder_start_token_id",
                                             "forced_bos_token_id",
                                             "forced_eos_token_id",
                                             "max_length",
                                             "min_length",
                                             "do_sample",
                                             "early_stopping",
                                             "num_beams",
                                             "num_beam_groups",
                                             "diversity_penalty",
                                             "temperature",
                                             "top_k",
                                             "top_p",
                                             "typical_p",
                                             "repetition_penalty",
                                             "length_penalty",
                                             "no_repeat_ngram_size",
                                             "encoder_no_repeat_ngram_size",
                                             "bad_words_ids",
                                             "num_return_sequences",
                                             "output_scores",
                                             "return_dict_in_generate",
                                             "remove_invalid_values",
                                             "exponential_decay_length_penalty",
                                             "suppress_tokens",
                                             "begin_suppress_tokens",
                                             "unsloth_fixed",
                                             "unsloth_version",
                                             "model_name",
                                             "name_or_path",
                                             "is_decoder",
                                             "boi_token_id",
                                             "eoi_token_id",
                                             "image_token_id",
                                             "mask_token_id",
                                             "unk_token_id",
                                             "cache_implementation",
                                             "max_window_layers",
                                             "no_rope_layer_interval",
                                             "sliding_window_pattern"};

/// Known in some model to change the result; no family of the table supports them.
constexpr RefusedKey kRefusedKeys[] = {
    {"attention_bias", 0, "biases of the attention projections are not supported"},
    {"mlp_bias", 0, "biases of the MLP are not supported"},
    {"attention_dropout", 0, "dropout on attention weights is not supported"},
    {"hidden_dropout", 0, "dropout on hidden states is not supported"},
    {"resid_pdrop", 0, "dropout on hidden states is not supported"},
    {"embd_pdrop", 0, "dropout on embeddings is not supported"},
    {"attention_out_bias", 0, "biases of the attention projections are not supported"},
    {"use_bias", 0, "biases are not supported"},
    {"residual_dropout", 0, "dropout on hidden states is not supported"},
    {"use_bidirectional_attention", 0, "attention is causal"},
    {"use_sliding_window", 0, "attention covers all earlier positions"},
    {"attention_chunk_size", 0, "attention covers all earlier positions"},
    {"partial_rotary_factor", 1, "rotary embeddings rotate the whole head"},
    {"no_rope_layers", 0, "every layer has rotary embeddings"},
    {"alibi", 0, "positions are rotary"},
    {"final_logit_softcapping", 0, "logits are not capped"},
    {"attn_logit_softcapping", 0, "attention scores are not capped"},
    {"query_pre_attn_scalar", 0, "attention scores are scaled by 1 / sqrt(head_dim)"},
    {"attention_multiplier", 0, "attention scores are scaled by 1 / sqrt(head_dim)"},
    {"embedding_multiplier", 1, "embeddings are not scaled"},
    {"scale_emb", 1, "embeddings are not scaled"},
    {"residual_multiplier", 1, "residuals are not scaled"},
    {"scale_depth", 0, "residuals are not scaled"},
    {"logits_scaling", 1, "logits are not scaled"},
    {"logit_scale", 1, "logits are not scaled"},
    {"use_qk_norm", 0, "queries and keys are not normalized"},
    {"qk_layernorm", 0, "queries and keys are not normalized"},
    {"num_experts", 0, "mixtures of experts are not supported"},
    {"num_local_experts", 0, "mixtures of experts are not supported"},
    {"n_routed_experts", 0, "mixtures of experts are not supported"},
    {"is_encoder_decoder", 0, "the model must be a decoder"},
    {"add_cross_attention", 0, "the model must be a decoder"},
    {"tie_encoder_decoder", 0, "the model must be a decoder"},
    {"pruned_heads", 0, "every layer has all heads"},
    {"per_layer_config", 0, "all layers have one shape"},
    {"text_config", 0, "the model must be text only"},
    {"vision_config", 0, "the model must be text only"},
    {"compression_config", 0, "only bitsandbytes four-bit checkpoints are supported"},
};

/// Read by parse_model_config, together with its field table and kRefusedKeys: a value under a name that is nearly one of these would have no effect.
constexpr std::string_view kReadKeys[] = {"model_type",        "architectures",       "hidden_act",
                                          "hidden_activation", "rope_theta",          "rope_local_base_freq",
                                          "rope_scaling",      "rope_parameters",     "position_embedding_type",
                                          "eos_token_id",      "quantization_config", "torch_dtype",
                                          "layer_types",       "sliding_window",      "shared_intermediate_size",
                                          "auto_map",          "trust_remote_code"};

std::vector<std::string_view> known_keys() {
  std::vector<std::string_view> known(std::begin(kReadKeys), std::end(kReadKeys));
  for (const ConfigField& field : config_fields()) known.push_back(field.key);
  return known;
}

bool is_neutral(const Json& value, double neutral) {
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_number()) return value.get<double>() == neutral;
  return (value.is_array() || value.is_object()) && value.empty();
}

/// "eot_token_id" and "sep_token" are keys of other programs, "eso_token_id" is a slip: it has the letters of a key that is read.
bool names_a_token(std::string_view key) {
  if (!key.ends_with("_token") && !key.ends_with("_token_id") && !key.ends_with("_token_ids")) return false;
  const auto letters = [](std::string_view text) {
    std::string sorted(text);
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  };
  const std::vector<std::string_view> known = known_keys();
  return std::none_of(known.begin(), known.end(), [&](std::string_view name) { return letters(name) == letters(key); });
}

/// The key that was probably meant. Other programs' keys are many: only what two slips of a hand explain counts.
std::string misspelled(std::string_view key) {
  if (names_a_token(key)) return "";
  std::vector<std::string_view> known = known_keys();
  for (const RefusedKey& rule : kRefusedKeys) known.push_back(rule.key);
  if (std::find(known.begin(), known.end(), key) != known.end()) return "";  // of another family
  return did_you_mean(key, known, key.size() < 8 ? 1 : 2);
}

void refuse_misspelled(const std::string& where, const std::string& key) {
  const std::string meant = misspelled(key);
  QLORAPP_CHECK_FORMAT(meant.empty(), "[{}] {} is not a key of a model.{} Correct it, or remove it: its value has no effect.",
                       where, printable(key), meant);
}

bool changes_nothing(std::string_view key) {
  return key.starts_with('_') || std::find(std::begin(kIgnoredKeys), std::end(kIgnoredKeys), key) != std::end(kIgnoredKeys);
}

/// Two names of one function each.
void check_activation(JsonFields& fields, const Family& family) {
  const bool silu = family.activation == Activation::kSilu;
  for (const std::string_view key : {"hidden_act", "hidden_activation"}) {
    const auto act = fields.text(key);
    // In the files of Gemma 1 hidden_act "gelu" means the form with tanh, as transformers reads it; hidden_activation means what it says.
    const bool is_tanh = act == "gelu_pytorch_tanh" || (act == "gelu" && key == "hidden_act");
    if (!act || (silu ? *act == "silu" || *act == "swish" : is_tanh)) continue;
    refuse(fields, family, key, message("must be {}", silu ? "silu" : "gelu_pytorch_tanh"), Json(*act));
  }
}

/// For a family whose layers attend to all earlier positions.
void refuse_windows(JsonFields& fields, const Family& family) {
  const auto types = fields.texts("layer_types");
  if (types) {
    for (const std::string& type : *types) {
      if (type != "full_attention") refuse(fields, family, "layer_types", "must be full_attention in every layer", Json(type));
    }
  }
  const Json* const uses_window = fields.value("use_sliding_window");
  const Json* const window = fields.value("sliding_window");
  const bool has_no_window = types.has_value() || (uses_window != nullptr && is_neutral(*uses_window, 0));
  if (window != nullptr && !is_neutral(*window, 0) && !has_no_window) {
    refuse(fields, family, "sliding_window",
           "is not supported: attention covers all earlier positions, which \"use_sliding_window\": false says, too", *window);
  }
}

}  // namespace

void refuse(const JsonFields& fields, const Family& family, std::string_view key, std::string_view rule, const Json& got) {
  throw UnsupportedModel(
      message("[{}] {} {} in a model of type {}; got {}. Python's AutoModelForCausalLM trains it in transformers' code.",
              fields.where(), key, rule, family.model_type, shown(got)));
}

void judge_keys_around_text(const Json& config, const std::string& where) {
  for (const auto& [key, value] : config.items()) {
    if (!value.is_null() && !changes_nothing(key)) refuse_misspelled(where, key);
  }
}

void judge_other_keys(JsonFields& fields, const Family& family) {
  for (const std::string_view key : {"auto_map", "trust_remote_code", "custom_pipelines"}) {
    if (const Json* value = fields.value(key)) {
      fields.fail(key, "must be absent: code from a model folder is never run", *value,
                  "Use a model of a known architecture without custom code.");
    }
  }
  check_activation(fields, family);
  if (family.window_rule == WindowRule::kNone) refuse_windows(fields, family);
  const auto ignored_by_family = [&](std::string_view key) {
    return std::find(family.ignored_keys.begin(), family.ignored_keys.end(), key) != family.ignored_keys.end();
  };
  const auto is_unapplied = [&](std::string_view key) {
    return std::find(family.unapplied_keys.begin(), family.unapplied_keys.end(), key) != family.unapplied_keys.end();
  };
  const auto judge = [&](const RefusedKey& rule) {
    const Json* value = ignored_by_family(rule.key) || accepts(family, rule.key) ? nullptr : fields.value(rule.key);
    if (value == nullptr || is_neutral(*value, rule.neutral)) return;
    if (!is_unapplied(rule.key)) refuse(fields, family, rule.key, message("is not supported: {}", rule.reason), *value);
    log_warning_once(message("[{}] {} {} is not applied: adapters are trained without it, and have lora_dropout.", fields.where(),
                             rule.key, shown(*value)));
  };
  for (const RefusedKey& rule : kRefusedKeys) judge(rule);
  std::vector<std::string> unknown;
  for (const std::string& key : fields.remaining()) {
    if (changes_nothing(key) || ignored_by_family(key)) continue;
    if (fields.value(key) != nullptr) refuse_misspelled(fields.where(), key);
    unknown.push_back(key);
  }
  if (!unknown.empty()) log_warning_once(message("[{}] unknown keys are ignored: {}.", fields.where(), listed(unknown)));
}

}  // namespace qlorapp::format
