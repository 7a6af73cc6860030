// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "qlorapp/format/family.hpp"

namespace qlorapp::format {
namespace {

using enum Bias;
using enum Group;
using enum Site;
using enum Size;

using Key = std::string_view;

constexpr auto kPreNorms =
    std::to_array<NormRow>({{"input_layernorm", kBeforeAttention}, {"post_attention_layernorm", kBeforeMlp}});
constexpr auto kQwen3Norms = std::to_array<NormRow>({{"input_layernorm", kBeforeAttention},
                                                     {"post_attention_layernorm", kBeforeMlp},
                                                     {"self_attn.q_norm", kQuery, kHead},
                                                     {"self_attn.k_norm", kKey, kHead}});
constexpr auto kHunyuanNorms = std::to_array<NormRow>({{"input_layernorm", kBeforeAttention},
                                                       {"post_attention_layernorm", kBeforeMlp},
                                                       {"self_attn.query_layernorm", kQuery, kHead},
                                                       {"self_attn.key_layernorm", kKey, kHead}});
constexpr auto kGemma3Norms = std::to_array<NormRow>({{"input_layernorm", kBeforeAttention},
                                                      {"post_attention_layernorm", kAfterAttention},
                                                      {"pre_feedforward_layernorm", kBeforeMlp},
                                                      {"post_feedforward_layernorm", kAfterMlp},
                                                      {"self_attn.q_norm", kQuery, kHead},
                                                      {"self_attn.k_norm", kKey, kHead}});
constexpr auto kGlm4Norms = std::to_array<NormRow>({{"input_layernorm", kBeforeAttention},
                                                    {"post_self_attn_layernorm", kAfterAttention},
                                                    {"post_attention_layernorm", kBeforeMlp},
                                                    {"post_mlp_layernorm", kAfterMlp}});
constexpr auto kOlmoNorms = std::to_array<NormRow>({{"post_attention_layernorm", kAfterAttention},
                                                    {"post_feedforward_layernorm", kAfterMlp},
                                                    {"self_attn.q_norm", kQuery, kQueries},
                                                    {"self_attn.k_norm", kKey, kKeys}});
constexpr auto kExaone4Norms = std::to_array<NormRow>({{"post_attention_layernorm", kAfterAttention},
                                                       {"post_feedforward_layernorm", kAfterMlp},
                                                       {"self_attn.q_norm", kQuery, kHead},
                                                       {"self_attn.k_norm", kKey, kHead}});

/// The seven layers of most families, with their biases.
constexpr std::array<LinearRow, 7> seven(Bias qkv, Bias o, Bias mlp) {
  return {{{"self_attn.q_proj", kQkv, kQueries, kHidden, qkv},
           {"self_attn.k_proj", kQkv, kKeys, kHidden, qkv},
           {"self_attn.v_proj", kQkv, kKeys, kHidden, qkv},
           {"self_attn.o_proj", kO, kHidden, kQueries, o},
           {"mlp.gate_proj", kGateUp, kInner, kHidden, mlp},
           {"mlp.up_proj", kGateUp, kInner, kHidden, mlp},
           {"mlp.down_proj", kDown, kHidden, kInner, mlp}}};
}
constexpr auto kPlainLinears = seven(kNone, kNone, kNone);
constexpr auto kLlamaLinears = seven(kAttentionBias, kAttentionBias, kMlpBias);
constexpr auto kQwen2Linears = seven(kAlways, kNone, kNone);
constexpr auto kBiasedAttention = seven(kAttentionBias, kAttentionBias, kNone);
constexpr auto kErnieLinears = seven(kUseBias, kUseBias, kUseBias);
constexpr auto kSeedLinears = seven(kAttentionBias, kAttentionOutBias, kMlpBias);
constexpr auto kHeliumLinears = seven(kAttentionBias, kNone, kMlpBias);
constexpr auto kPhi3Linears = std::to_array<LinearRow>({{"self_attn.qkv_proj", kQkv, kAllHeads, kHidden},
                                                        {"self_attn.o_proj", kO, kHidden, kQueries},
                                                        {"mlp.gate_up_proj", kGateUp, kTwoInner, kHidden},
                                                        {"mlp.down_proj", kDown, kHidden, kInner}});
constexpr auto kGlm4Linears = std::to_array<LinearRow>({{"self_attn.q_proj", kQkv, kQueries, kHidden, kAttentionBias},
                                                        {"self_attn.k_proj", kQkv, kKeys, kHidden, kAttentionBias},
                                                        {"self_attn.v_proj", kQkv, kKeys, kHidden, kAttentionBias},
                                                        {"self_attn.o_proj", kO, kHidden, kQueries},
                                                        {"mlp.gate_up_proj", kGateUp, kTwoInner, kHidden},
                                                        {"mlp.down_proj", kDown, kHidden, kInner}});
constexpr auto kGranite4Linears = std::to_array<LinearRow>({{"self_attn.q_proj", kQkv, kQueries, kHidden, kAttentionBias},
                                                            {"self_attn.k_proj", kQkv, kKeys, kHidden, kAttentionBias},
                                                            {"self_attn.v_proj", kQkv, kKeys, kHidden, kAttentionBias},
                                                            {"self_attn.o_proj", kO, kHidden, kQueries, kAttentionBias},
                                                            {"shared_mlp.input_linear", kGateUp, kTwoInner, kHidden},
                                                            {"shared_mlp.output_linear", kDown, kHidden, kInner}});

constexpr auto kBiasKeys = std::to_array<Key>({"attention_bias", "mlp_bias"});
constexpr auto kAttentionBiasKey = std::to_array<Key>({"attention_bias"});
/// transformers' Llama does not read them. original_max_position_embeddings counts with rope type llama3.
constexpr auto kUnreadByLlama =
    std::to_array<Key>({"pretraining_tp", "resid_pdrop", "embd_pdrop", "hidden_dropout", "original_max_position_embeddings"});
constexpr auto kQwen2Keys = std::to_array<Key>({"use_sliding_window", "layer_types"});
constexpr auto kQwen3Keys = std::to_array<Key>({"attention_bias", "use_sliding_window", "layer_types"});
constexpr auto kGemma3Keys =
    std::to_array<Key>({"attention_bias", "query_pre_attn_scalar", "final_logit_softcapping", "layer_types"});
constexpr auto kGranite4Keys = std::to_array<Key>(
    {"attention_bias", "embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier", "layer_types"});
constexpr auto kGraniteKeys = std::to_array<Key>(
    {"attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"});
/// Of layers that a dense model has not got.
constexpr auto kUnreadByGranite4 = std::to_array<Key>(
    {"mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size",
     "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
     "init_method", "normalization_function", "intermediate_size"});
constexpr auto kSmolLM3Keys = std::to_array<Key>(
    {"attention_bias", "mlp_bias", "use_sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"});
constexpr auto kOlmo3Keys = std::to_array<Key>({"attention_bias", "layer_types"});
constexpr auto kPartialKey = std::to_array<Key>({"partial_rotary_factor"});
constexpr auto kPhi3LongRope = std::to_array<Key>({"su", "yarn"});
constexpr auto kPhi3Targets = std::to_array<Key>({"qkv_proj"});
constexpr auto kGlm4Keys = std::to_array<Key>({"attention_bias", "partial_rotary_factor"});
constexpr auto kLayerTypesKey = std::to_array<Key>({"layer_types"});
constexpr auto kErnieKeys = std::to_array<Key>({"use_bias"});
constexpr auto kSeedKeys = std::to_array<Key>({"attention_bias", "attention_out_bias", "mlp_bias"});
constexpr auto kUnreadByHunyuan = std::to_array<Key>({"use_qk_norm",      "pretraining_tp",     "use_cla",
                                                      "cla_share_factor", "use_rotary_pos_emb", "attention_head_dim",
                                                      "norm_type",        "org_vocab_size",     "add_classification_head",
                                                      "class_num",        "mask_init_id",       "pool_type",
                                                      "eod_token_id",     "im_end_id",          "im_newline_id",
                                                      "im_start_id",      "image_token_id",     "text_end_id",
                                                      "text_start_id",    "sep_token_id",       "num_media_embeds",
                                                      "dense_list"});
constexpr auto kSeedDropout = std::to_array<Key>({"attention_dropout", "residual_dropout"});

constexpr auto kSplitGateUp = std::to_array<std::string_view>({"gate_proj", "up_proj"});
constexpr auto kAnyBias = std::to_array<Group>({kQkv, kO, kGateUp, kDown});
constexpr auto kQkvBias = std::to_array<Group>({kQkv});

/// Defaults of transformers' Qwen2VLTextConfig and Qwen2_5_VLTextConfig.
constexpr std::string_view kQwen2Text =
    R"({"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80})";
constexpr auto kAroundQwen2 = std::to_array<Wrapper>({{.architecture = "Qwen2VLForConditionalGeneration",
                                                       .model_type = "qwen2_vl",
                                                       .text_type = "qwen2_vl_text",
                                                       .ties_tables = false,
                                                       .defaults = kQwen2Text},
                                                      {.architecture = "Qwen2_5_VLForConditionalGeneration",
                                                       .model_type = "qwen2_5_vl",
                                                       .text_type = "qwen2_5_vl_text",
                                                       .ties_tables = false,
                                                       .defaults = kQwen2Text}});
constexpr auto kAroundQwen3 =
    std::to_array<Wrapper>({{.architecture = "Qwen3VLForConditionalGeneration",
                             .model_type = "qwen3_vl",
                             .text_type = "qwen3_vl_text",
                             .ties_tables = false,
                             .defaults = R"({"rope_theta": 500000.0, "max_position_embeddings": 128000})"}});
// LLaVA 1.5, Pixtral 12B.
constexpr auto kAroundLlama = std::to_array<Wrapper>({{.architecture = "LlavaForConditionalGeneration", .model_type = "llava"}});
// Mistral Small 3.1 and later, Magistral and Devstral with eyes; Ministral 3.
constexpr auto kAroundMistral =
    std::to_array<Wrapper>({{.architecture = "Mistral3ForConditionalGeneration", .model_type = "mistral3"}});
// Gemma 3 4B to 27B, MedGemma.
constexpr auto kAroundGemma3 = std::to_array<Wrapper>({{.architecture = "Gemma3ForConditionalGeneration", .model_type = "gemma3"}});

constexpr auto kFamilies = std::to_array<Family>({
    // Llama 2, 3, 3.1, 3.2, 3.3, and the many models published under its architecture.
    {.architecture = "LlamaForCausalLM",
     .model_type = "llama",
     .norms = kPreNorms,
     .linears = kLlamaLinears,
     .defaults = R"({"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048})",
     .accepted_keys = kBiasKeys,
     .ignored_keys = kUnreadByLlama,
     .gguf = {.architecture = "llama", .turns_neighbors = true, .biases = kAnyBias},
     .wrappers = kAroundLlama},
    // Qwen3 0.6B to 32B, the 2507 models, and R1's distillation into 8B.
    {.architecture = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .norms = kQwen3Norms,
     .linears = kBiasedAttention,
     .window_rule = WindowRule::kFromMaxWindowLayers,
     .defaults = R"({"num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                     "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": false})",
     .accepted_keys = kQwen3Keys,
     .gguf = {.architecture = "qwen3"},
     .wrappers = kAroundQwen3},
    // Qwen2 and 2.5, Coder, Math, QwQ, R1's distillations into them.
    {.architecture = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .norms = kPreNorms,
     .linears = kQwen2Linears,
     .window_rule = WindowRule::kFromMaxWindowLayers,
     .defaults = R"({"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768,
                     "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": false})",
     .accepted_keys = kQwen2Keys,
     .gguf = {.architecture = "qwen2", .biases = kQkvBias},
     .wrappers = kAroundQwen2},
    // Mistral 7B, Nemo, Small up to 2501, Devstral, Magistral, Zephyr.
    {.architecture = "MistralForCausalLM",
     .model_type = "mistral",
     .norms = kPreNorms,
     .linears = kPlainLinears,
     .window_rule = WindowRule::kAll,
     .defaults = R"({"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 131072,
                     "sliding_window": 4096})",
     .gguf = {.architecture = "llama", .turns_neighbors = true},
     .wrappers = kAroundMistral},
    {.architecture = "MinistralForCausalLM",
     .model_type = "ministral",
     .norms = kPreNorms,
     .linears = kPlainLinears,
     .window_rule = WindowRule::kAll,
     .defaults = R"({"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 131072,
                     "sliding_window": 4096})",
     .accepted_keys = kLayerTypesKey,
     .gguf = {.architecture = "llama", .turns_neighbors = true}},
    {.architecture = "Ministral3ForCausalLM",
     .model_type = "ministral3",
     .norms = kPreNorms,
     .linears = kPlainLinears,
     .window_rule = WindowRule::kAll,
     .defaults = R"({"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                     "max_position_embeddings": 262144, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                     "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0,
                     "mscale": 1.0, "llama_4_scaling_beta": 0.1}})",
     .gguf = {.architecture = "mistral3", .turns_neighbors = true}},
    // Gemma 1 and CodeGemma.
    {.architecture = "GemmaForCausalLM",
     .model_type = "gemma",
     .norms = kPreNorms,
     .linears = kBiasedAttention,
     .norm_rule = NormRule::kOnePlus,
     .activation = Activation::kGeluTanh,
     .scales_embedding = true,
     .defaults = R"({"num_key_value_heads": 16, "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                     "max_position_embeddings": 8192, "tie_word_embeddings": true})",
     .accepted_keys = kAttentionBiasKey,
     .gguf = {.architecture = "gemma"}},
    // Gemma 3 270M and 1B, FunctionGemma, and the text of 4B to 27B and MedGemma.
    {.architecture = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .norms = kGemma3Norms,
     .linears = kBiasedAttention,
     .norm_rule = NormRule::kOnePlus,
     .activation = Activation::kGeluTanh,
     .window_rule = WindowRule::kPattern,
     .rope_rule = RopeRule::kByLayerType,
     .scales_embedding = true,
     .float16_stream_scale = 1.0 / 128,
     .defaults =
         R"({"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
                     "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "max_position_embeddings": 131072, "tie_word_embeddings": true,
                     "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6})",
     .accepted_keys = kGemma3Keys,
     .gguf = {.architecture = "gemma3", .has_windows = true, .window_period = 6, .wide_scale_depth = 62},
     .wrappers = kAroundGemma3},
    // Phi-3, 3.5, 4 and 4-mini.
    {.architecture = "Phi3ForCausalLM",
     .model_type = "phi3",
     .norms = kPreNorms,
     .linears = kPhi3Linears,
     .window_rule = WindowRule::kAll,
     .longrope_names = kPhi3LongRope,
     .defaults = R"({"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
                     "original_max_position_embeddings": 4096})",
     .accepted_keys = kPartialKey,
     .lora_targets = kPhi3Targets,
     .gguf = {.architecture = "phi3"}},
    // Granite 3.
    {.architecture = "GraniteForCausalLM",
     .model_type = "granite",
     .norms = kPreNorms,
     .linears = kLlamaLinears,
     .defaults = R"({"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "attention_multiplier": 1.0})",
     .accepted_keys = kGraniteKeys,
     .gguf = {.architecture = "granite", .turns_neighbors = true, .has_multipliers = true, .biases = kAnyBias}},
    // Granite 4 without Mamba layers and experts.
    {.architecture = "GraniteMoeHybridForCausalLM",
     .model_type = "granitemoehybrid",
     .norms = kPreNorms,
     .linears = kGranite4Linears,
     .window_rule = WindowRule::kAll,
     .rope_rule = RopeRule::kIfNamed,
     .defaults = R"({"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "attention_multiplier": 1.0,
                     "shared_intermediate_size": 1024, "num_local_experts": 8, "layer_types": []})",
     .accepted_keys = kGranite4Keys,
     .ignored_keys = kUnreadByGranite4,
     .width_key = "shared_intermediate_size",
     .gguf =
         {.architecture = "granite", .turns_neighbors = true, .splits_gate_up = true, .has_multipliers = true, .biases = kAnyBias}},
    {.architecture = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .norms = kPreNorms,
     .linears = kLlamaLinears,
     .window_rule = WindowRule::kNoRopeLayers,
     .rope_rule = RopeRule::kNoRopeLayers,
     .defaults = R"({"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 2000000.0, "max_position_embeddings": 32768,
                     "tie_word_embeddings": true, "no_rope_layer_interval": 4, "use_sliding_window": false})",
     .accepted_keys = kSmolLM3Keys,
     .gguf = {.architecture = "smollm3", .turns_neighbors = true, .no_rope_step = 4, .biases = kQkvBias},
     .servers = {.in_sglang = false}},
    {.architecture = "Olmo2ForCausalLM",
     .model_type = "olmo2",
     .norms = kOlmoNorms,
     .linears = kBiasedAttention,
     .norm_rule = NormRule::kRoundOnce,
     .defaults = R"({"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048})",
     .accepted_keys = kAttentionBiasKey,
     .gguf = {.architecture = "olmo2"}},
    {.architecture = "Olmo3ForCausalLM",
     .model_type = "olmo3",
     .norms = kOlmoNorms,
     .linears = kBiasedAttention,
     .norm_rule = NormRule::kRoundOnce,
     .window_rule = WindowRule::kPattern,
     .rope_rule = RopeRule::kByLayerType,
     .defaults = R"({"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 2048, "sliding_window": 4096,
                     "sliding_window_pattern": 4})",
     .accepted_keys = kOlmo3Keys,
     .gguf = {.architecture = "olmo2", .has_windows = true}},
    // GLM-4-0414 and Z1.
    {.architecture = "Glm4ForCausalLM",
     .model_type = "glm4",
     .norms = kGlm4Norms,
     .linears = kGlm4Linears,
     .interleaved = true,
     .defaults = R"({"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0,
                     "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "attention_bias": true})",
     .accepted_keys = kGlm4Keys,
     .gguf = {.architecture = "glm4", .turns_neighbors = true, .biases = kQkvBias},
     .servers = {.vllm_gate_up = kSplitGateUp}},
    {.architecture = "Exaone4ForCausalLM",
     .model_type = "exaone4",
     .norms = kExaone4Norms,
     .linears = kPlainLinears,
     .window_rule = WindowRule::kPattern,
     .rope_rule = RopeRule::kSlidingOnly,
     .defaults = R"({"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
                     "sliding_window": 4096, "sliding_window_pattern": 4})",
     .accepted_keys = kLayerTypesKey,
     .gguf = {.architecture = "exaone4", .has_windows = true, .windowed_depth = 64}},
    {.architecture = "Ernie4_5ForCausalLM",
     .model_type = "ernie4_5",
     .norms = kPreNorms,
     .linears = kErnieLinears,
     .interleaved = true,
     .defaults = R"({"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                     "max_position_embeddings": 131072, "tie_word_embeddings": true})",
     .accepted_keys = kErnieKeys,
     .gguf = {.architecture = "ernie4_5", .turns_neighbors = true}},
    {.architecture = "SeedOssForCausalLM",
     .model_type = "seed_oss",
     .norms = kPreNorms,
     .linears = kSeedLinears,
     .defaults = R"({"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                     "max_position_embeddings": 524288, "attention_bias": true, "attention_dropout": 0.1, "residual_dropout": 0.1})",
     .accepted_keys = kSeedKeys,
     .unapplied_keys = kSeedDropout,
     .gguf = {.architecture = "seed_oss", .mlp_norm = "post_attention_norm", .biases = kQkvBias},
     .servers = {.in_sglang = false}},
    {.architecture = "HunYuanDenseV1ForCausalLM",
     .model_type = "hunyuan_v1_dense",
     .norms = kHunyuanNorms,
     .linears = kBiasedAttention,
     .turns_before_norm = true,
     .defaults = R"({"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048})",
     .accepted_keys = kAttentionBiasKey,
     .ignored_keys = kUnreadByHunyuan,
     .gguf = {.architecture = "hunyuan-dense"}},
    {.architecture = "HeliumForCausalLM",
     .model_type = "helium",
     .norms = kPreNorms,
     .linears = kHeliumLinears,
     .norm_rule = NormRule::kRoundOnce,
     .interleaved = true,
     .defaults = R"({"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0,
                     "max_position_embeddings": 4096})",
     .accepted_keys = kBiasKeys,
     .gguf = {.architecture = "llama", .turns_neighbors = true, .biases = kAnyBias},
     .servers = {.in_sglang = false}},
});

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
  // Heads that are normed one by one turn as a whole, by their halves (ops/rope.hpp).
  const bool turns_whole = !family.interleaved && !accepts(family, "partial_rotary_factor");
  // Norms before the parts take the scale of the stream out.
  if (family.float16_stream_scale != 1 && !(has(kBeforeAttention) && has(kBeforeMlp))) return false;
  return next == kGroups && (!has(kQuery) || family.turns_before_norm || turns_whole) && has(kQuery) == has(kKey) &&
         (has(kBeforeAttention) || has(kAfterAttention)) && (has(kBeforeMlp) || has(kAfterMlp));
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
