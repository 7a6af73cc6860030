// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "qlorapp/format/family.hpp"

namespace qlorapp::format {
namespace {

using enum Group;
using enum Site;
using enum Size;

constexpr std::array<NormRow, 2> kLlamaNorms{{{"input_layernorm", kBeforeAttention}, {"post_attention_layernorm", kBeforeMlp}}};
constexpr std::array<LinearRow, 7> kLlamaLinears{{{"self_attn.q_proj", kQkv, kQueries, kHidden, Bias::kAttentionBias},
                                                  {"self_attn.k_proj", kQkv, kKeys, kHidden, Bias::kAttentionBias},
                                                  {"self_attn.v_proj", kQkv, kKeys, kHidden, Bias::kAttentionBias},
                                                  {"self_attn.o_proj", kO, kHidden, kQueries, Bias::kAttentionBias},
                                                  {"mlp.gate_proj", kGateUp, kInner, kHidden, Bias::kMlpBias},
                                                  {"mlp.up_proj", kGateUp, kInner, kHidden, Bias::kMlpBias},
                                                  {"mlp.down_proj", kDown, kHidden, kInner, Bias::kMlpBias}}};
constexpr std::array<std::string_view, 2> kBiasKeys{"attention_bias", "mlp_bias"};
/// transformers' Llama does not read them. original_max_position_embeddings counts with rope type llama3.
constexpr std::array<std::string_view, 5> kUnreadByLlama{"pretraining_tp", "resid_pdrop", "embd_pdrop", "hidden_dropout",
                                                         "original_max_position_embeddings"};

constexpr std::array<NormRow, 4> kQwen3Norms{{{"input_layernorm", kBeforeAttention},
                                              {"post_attention_layernorm", kBeforeMlp},
                                              {"self_attn.q_norm", kQuery, kHead},
                                              {"self_attn.k_norm", kKey, kHead}}};
constexpr std::array<std::string_view, 5> kQwenKeys{"attention_bias", "use_sliding_window", "sliding_window", "max_window_layers",
                                                    "layer_types"};

constexpr std::array kFamilies{
    // Llama 2, 3, 3.1, 3.2, 3.3, and the many models published under its architecture.
    Family{.architecture = "LlamaForCausalLM",
           .model_type = "llama",
           .norms = kLlamaNorms,
           .linears = kLlamaLinears,
           .defaults = R"({"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048})",
           .accepted_keys = kBiasKeys,
           .ignored_keys = kUnreadByLlama},
    // Qwen3 0.6B to 32B, the 2507 models, and R1's distillation into 8B.
    Family{
        .architecture = "Qwen3ForCausalLM",
        .model_type = "qwen3",
        .norms = kQwen3Norms,
        .linears = kLlamaLinears,
        .window_rule = WindowRule::kFromMaxWindowLayers,
        .defaults =
            R"({"num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768,
                           "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": false})",
        .accepted_keys = kQwenKeys},
};

/// A block's groups are all there, in their order, and one norm acts at a site at most.
constexpr bool is_sound(const Family& family) {
  size_t next = 0;
  for (const LinearRow& row : family.linears) {
    const auto group = static_cast<size_t>(row.group);
    if (group != next && group + 1 != next) return false;
    next = group + 1;
  }
  for (size_t i = 0; i < family.norms.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (family.norms[i].site == family.norms[j].site) return false;
    }
  }
  const auto has = [&](Site site) {
    for (const NormRow& row : family.norms) {
      if (row.site == site) return true;
    }
    return false;
  };
  return next == kGroups && has(kQuery) == has(kKey) && (has(kBeforeAttention) || has(kAfterAttention)) &&
         (has(kBeforeMlp) || has(kAfterMlp));
}
static_assert([] {
  for (const Family& family : kFamilies) {
    if (!is_sound(family)) return false;
  }
  return true;
}());

}  // namespace

std::span<const Family> families() { return kFamilies; }

}  // namespace qlorapp::format
