// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "qlorapp/format/family.hpp"

namespace qlorapp::format {
namespace {

/// transformers' Llama does not read them. original_max_position_embeddings counts with rope type llama3.
constexpr std::array<std::string_view, 5> kUnreadByLlama{"pretraining_tp", "resid_pdrop", "embd_pdrop", "hidden_dropout",
                                                         "original_max_position_embeddings"};

constexpr std::array<BlockRow, 9> kLlamaBlock{{{"input_layernorm", Role::kNorm, Size::kHidden},
                                               {"post_attention_layernorm", Role::kNorm, Size::kHidden},
                                               {"self_attn.q_proj", Role::kLinear, Size::kQueries, Size::kHidden},
                                               {"self_attn.k_proj", Role::kLinear, Size::kKeys, Size::kHidden},
                                               {"self_attn.v_proj", Role::kLinear, Size::kKeys, Size::kHidden},
                                               {"self_attn.o_proj", Role::kLinear, Size::kHidden, Size::kQueries},
                                               {"mlp.gate_proj", Role::kLinear, Size::kInner, Size::kHidden},
                                               {"mlp.up_proj", Role::kLinear, Size::kInner, Size::kHidden},
                                               {"mlp.down_proj", Role::kLinear, Size::kHidden, Size::kInner}}};

// Llama 2, 3, 3.1, 3.2, 3.3, and the many models published under its architecture.
constexpr std::array<Family, 1> kFamilies{{{.architecture = "LlamaForCausalLM",
                                            .model_type = "llama",
                                            .block = kLlamaBlock,
                                            .tie_word_embeddings = false,
                                            .rms_norm_eps = 1e-6,
                                            .rope_theta = 10000.0,
                                            .max_position_embeddings = 2048,
                                            .ignored_keys = kUnreadByLlama,
                                            .refused_keys = {}}}};

}  // namespace

std::span<const Family> families() { return kFamilies; }

}  // namespace qlorapp::format
