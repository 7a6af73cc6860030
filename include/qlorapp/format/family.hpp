// SPDX-License-Identifier: Apache-2.0
/// A model family is a row of one table: what its config files leave out, which keys it reads, what a block consists of and how it computes.
/// So is a wrapper, a checkpoint that holds such a model as its part for text. Torch-free.
///
/// Source: transformers 5.23, the config class and the modeling file of each family.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace qlorapp::format {

/// Use of a parameter. QLoRA quantizes kLinear.
enum class Role : uint8_t { kEmbedding, kNorm, kBias, kLinear, kHead };

/// Extents that a config gives: hidden_size, head_dim, heads * head_dim, kv_heads * head_dim, queries with keys and values, intermediate_size,
/// and twice that.
enum class Size : uint8_t { kHidden, kHead, kQueries, kKeys, kAllHeads, kInner, kTwoInner };

/// Where a norm acts: before or behind one of the block's parts, or on queries and keys, each head alone or all heads of a token as one.
enum class Site : uint8_t { kBeforeAttention, kAfterAttention, kBeforeMlp, kAfterMlp, kQuery, kKey };

/// Linear layers that share an input and are multiplied as one, in the order of the forward pass. A layer that holds several (Phi-3's
/// qkv_proj) is the group's only one.
enum class Group : uint8_t { kQkv, kO, kGateUp, kDown };
inline constexpr size_t kGroups = 4;

/// Whether a linear layer has a bias: never, always, or by the config key of this name.
enum class Bias : uint8_t { kNone, kAlways, kAttentionBias, kAttentionOutBias, kMlpBias, kUseBias };

struct NormRow {
  std::string_view path;  ///< Behind "model.layers.N.".
  Site site;
  Size width = Size::kHidden;
};

struct LinearRow {
  std::string_view path;
  Group group;
  Size out, in;
  Bias bias = Bias::kNone;
};

/// y = round(round(x / rms(x)) * w), round(x / rms(x) * w), or round(x / rms(x) * (1 + w)); `round` to the compute dtype.
enum class NormRule : uint8_t { kRoundTwice, kRoundOnce, kOnePlus };

/// Of the gate: silu, or GELU in its form with tanh.
enum class Activation : uint8_t { kSilu, kGeluTanh };

/// Which layers have the config's sliding_window, where layer_types does not say it: none; from max_window_layers on, if use_sliding_window is
/// true; all; all but each sliding_window_pattern-th; those without rotary embeddings, if use_sliding_window is true.
enum class WindowRule : uint8_t { kNone, kFromMaxWindowLayers, kAll, kPattern, kNoRopeLayers };

/// Which layers turn their heads by which rotary settings: all by one; those with a window by settings of their own; all but some that
/// no_rope_layers or no_rope_layer_interval names; those with a window alone, if there is a window; all, if position_embedding_type is rope.
enum class RopeRule : uint8_t { kOne, kByLayerType, kNoRopeLayers, kSlidingOnly, kIfNamed };

/// A key whose every other value than null, false, "empty" and `neutral` changes the result.
struct RefusedKey {
  std::string_view key;
  double neutral;
  std::string_view reason;
};

/// How llama.cpp computes a family (src/models there), and so how its files hold it.
struct GgufRow {
  std::string_view architecture = "";  ///< Empty: it does not.
  /// Pairs that turn are neighbors there; where they are halves of a head here, rows of queries and keys change places.
  bool turns_neighbors = false;
  bool splits_gate_up = false;  ///< A layer that holds gate and up is stored as two.
  bool has_windows = false;     ///< Those of some layers, by a period.
  int64_t window_period = 4;    ///< Of files that do not say it.
  int64_t windowed_depth = 0;   ///< Above 0: only in models of so many layers.
  int64_t no_rope_step =
      0;  ///< Above 0: each so many-th layer turns nothing. Else all turn, or where there are windows those alone.
  bool has_multipliers = false;
  std::string_view mlp_norm = "ffn_norm";  ///< The norm before the MLP.
  int64_t wide_scale_depth =
      0;  ///< Models of so many layers scale scores by 1 / sqrt(hidden_size / heads), others by 1 / sqrt(head_dim).
  std::span<const Group> biases = {};  ///< Groups of linear layers that may have them.
};

/// How servers hold adapters of a family, where it is not as in its files.
struct ServerRow {
  std::span<const std::string_view> vllm_gate_up = {};  ///< The words of two layers there that are one here.
  bool in_sglang = true;                                ///< It has a class for the family.
};

/// PEFT's choice for most families.
inline constexpr auto kUsualTargets = std::to_array<std::string_view>({"q_proj", "v_proj"});

/// A kind of checkpoint that holds a decoder of the family beside what reads images: text_config configures the decoder.
struct Wrapper {
  std::string_view architecture;  ///< Entry of "architectures".
  std::string_view model_type;
  std::string_view text_type = "";           ///< Another name of the family, which the wrapper's text_config has.
  std::string_view text = "language_model";  ///< The decoder's name in the model.
  bool ties_tables = true;                   ///< Where no config says tie_word_embeddings.
  /// As Family::defaults, which they replace key by key.
  std::string_view defaults = "{}";
};

struct Family {
  std::string_view architecture;  ///< Entry of "architectures".
  std::string_view model_type;
  std::span<const NormRow> norms;
  std::span<const LinearRow> linears;  ///< Group after group.
  NormRule norm_rule = NormRule::kRoundTwice;
  Activation activation = Activation::kSilu;
  WindowRule window_rule = WindowRule::kNone;
  RopeRule rope_rule = RopeRule::kOne;
  std::span<const std::string_view> longrope_names = {};  ///< Other names of the rope type longrope in the family's files.
  bool interleaved = false;                               ///< Neighbors form the pairs that turn, not the halves of a head.
  bool turns_before_norm = false;                         ///< Of normed queries and keys.
  bool scales_embedding = false;                          ///< By sqrt(hidden_size).
  /// Of the residual stream in float16, whose largest number is 65,504: a power of two, below 1 where published weights go beyond.
  double float16_stream_scale = 1;
  /// JSON under the keys of config.json: what transformers' config class assumes where a file has no such key.
  std::string_view defaults = "{}";
  std::span<const std::string_view> accepted_keys =
      {};  ///< Those that no other family computes (model_config_keys.cpp), and this one does.
  std::span<const std::string_view> ignored_keys = {};  ///< On top of those that change nothing in any family.
  std::span<const std::string_view> unapplied_keys =
      {};  ///< Change training in transformers, and are left out here with a word in the log.
  std::span<const std::string_view> lora_targets = kUsualTargets;  ///< Where a LoraConfig names none.
  std::string_view width_key = "intermediate_size";                ///< The key that says the width of the MLP.
  GgufRow gguf = {};
  ServerRow servers = {};
  std::span<const Wrapper> wrappers = {};
};

/// Whether the family computes a key that others refuse.
[[nodiscard]] constexpr bool accepts(const Family& family, std::string_view key) {
  for (const std::string_view accepted : family.accepted_keys) {
    if (accepted == key) return true;
  }
  return false;
}

/// The table.
[[nodiscard]] std::span<const Family> families();

}  // namespace qlorapp::format
