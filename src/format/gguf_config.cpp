// SPDX-License-Identifier: Apache-2.0
#include "gguf_config.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "gguf_model.hpp"
#include "qlorapp/format/family.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {
namespace {

constexpr int64_t kMostLayers = 4096;

class ConfigWriter {
 public:
  explicit ConfigWriter(const GgufFile& file)
      : file_(file), architecture_(file.require<std::string>("general.architecture")), family_(family_of()) {}

  Json write() {
    const int64_t heads = positive("attention.head_count"), width = positive("embedding_length");
    head_dim_ = maybe_whole("attention.key_length").value_or(width / heads);
    layers_ = whole("block_count");
    json_ = {{"architectures", {std::string(family_.architecture)}}, {"model_type", std::string(family_.model_type)}};
    json_["vocab_size"] = rows("token_embd.weight");
    json_["hidden_size"] = width;
    json_[std::string(family_.width_key)] = whole("feed_forward_length");
    json_["num_hidden_layers"] = layers_;
    json_["num_attention_heads"] = heads;
    json_["num_key_value_heads"] = maybe_whole("attention.head_count_kv").value_or(heads);
    json_["head_dim"] = head_dim_;
    json_["rms_norm_eps"] = real("attention.layer_norm_rms_epsilon", 1e-5);
    json_["max_position_embeddings"] = whole("context_length");
    json_["tie_word_embeddings"] = file_.find("output.weight") == nullptr;
    json_["torch_dtype"] = dtype();
    add_biases();
    add_windows();
    add_rope();
    add_scales(width, heads);
    add_tokens();
    return std::move(json_);
  }

 private:
  /// The first family of the architecture whose layers have the file's biases, and windows if the file has some.
  const Family& family_of() const {
    const Family* found = nullptr;
    const bool has_windows = file_.get<int64_t>(message("{}.attention.sliding_window", architecture_)).has_value();
    for (const Family& family : families()) {
      if (family.gguf.architecture != architecture_) continue;
      if (found == nullptr || (biases_of(family) && !biases_of(*found)) ||
          (found->gguf.has_windows != has_windows && family.gguf.has_windows == has_windows))
        found = &family;
    }
    if (found == nullptr) {
      throw UnsupportedModel(
          message("[{}] general.architecture is '{}', of a family that is not computed here. docs/families.md lists "
                  "those that are.",
                  file_.path(), architecture_));
    }
    return *found;
  }

  /// By the key that says it, whether layers have biases in the file; nothing if the family's layers cannot have these.
  [[nodiscard]] std::optional<std::map<Bias, bool>> biases_of(const Family& family) const {
    std::map<Bias, bool> found{{Bias::kNone, false}, {Bias::kAlways, true}};
    for (const LinearRow& row : family.linears) {
      const bool is_there = file_.find(message("blk.0.{}.bias", gguf_name(family, row))) != nullptr;
      if (found.emplace(row.bias, is_there).first->second != is_there) return std::nullopt;
    }
    return found;
  }

  [[nodiscard]] std::string key(const char* name) const { return message("{}.{}", architecture_, name); }
  [[nodiscard]] std::optional<int64_t> maybe_whole(const char* name) const { return file_.get<int64_t>(key(name)); }
  [[nodiscard]] int64_t whole(const char* name) const { return file_.require<int64_t>(key(name)); }
  [[nodiscard]] double real(const char* name, double otherwise) const {
    return shortest(file_.get<double>(key(name)).value_or(otherwise));
  }
  [[nodiscard]] int64_t positive(const char* name) const {
    const int64_t value = whole(name);
    QLORAPP_CHECK_FORMAT(value >= 1, "[{}] {} must be at least 1; got {}. The file is damaged; fetch it again.", file_.path(),
                         key(name), value);
    return value;
  }
  /// The number that a config.json has for a value that the file holds in float32: 1e-6 and not 9.99999997e-7.
  static double shortest(double value) {
    const auto single = static_cast<float>(value);
    return static_cast<double>(single) == value ? std::stod(message("{}", single)) : value;
  }
  [[nodiscard]] int64_t rows(const char* tensor) const {
    const GgufEntry* const found = file_.find(tensor);
    QLORAPP_CHECK_FORMAT(found != nullptr, "[{}] the file must hold the tensor {}; it does not. Use another file of the model.",
                         file_.path(), tensor);
    return found->shape.front();
  }
  [[nodiscard]] bool has(const char* tensor) const { return file_.find(tensor) != nullptr; }

  /// What the model computes in, unless something else is asked for.
  [[nodiscard]] std::string dtype() const {
    const GgufEntry* const first = file_.find("blk.0.ffn_down.weight");
    if (first != nullptr && first->type == GgufType::kF32) return "float32";
    return first != nullptr && first->type == GgufType::kF16 ? "float16" : "bfloat16";
  }

  void add_biases() {
    const std::pair<Bias, const char*> keys[] = {{Bias::kAttentionBias, "attention_bias"},
                                                 {Bias::kAttentionOutBias, "attention_out_bias"},
                                                 {Bias::kMlpBias, "mlp_bias"},
                                                 {Bias::kUseBias, "use_bias"}};
    const auto biases = biases_of(family_);
    for (const auto& [bias, name] : keys) {
      if (biases && biases->contains(bias)) json_[name] = biases->at(bias);
    }
  }

  void add_windows() {
    const auto window = maybe_whole("attention.sliding_window");
    if (accepts(family_, "use_sliding_window")) json_["use_sliding_window"] = false;
    json_["sliding_window"] = nullptr;
    if (!family_.gguf.has_windows) return;
    json_["layer_types"] =
        std::vector<std::string>(static_cast<size_t>(std::clamp<int64_t>(layers_, 0, kMostLayers)), "full_attention");
    if (!window || *window == 0) return;
    const std::string name = key("attention.sliding_window_pattern");
    std::vector<int64_t> slides;
    int64_t period = family_.gguf.window_period;
    try {
      period = file_.get<int64_t>(name).value_or(period);
    } catch (const FormatError&) { slides = file_.require<std::vector<int64_t>>(name); }  // newer files list the layers
    QLORAPP_CHECK_FORMAT(period >= 1, "[{}] {} must be at least 1; got {}. The file is damaged; fetch it again.", file_.path(),
                         name, period);
    json_["sliding_window"] = *window;
    for (size_t i = 0; i < json_["layer_types"].size(); ++i) {
      const bool has_window = slides.empty() ? static_cast<int64_t>(i) % period < period - 1 : i < slides.size() && slides[i] != 0;
      if (has_window) json_["layer_types"][i] = "sliding_attention";
    }
  }

  /// A tensor of one row.
  [[nodiscard]] std::vector<double> numbers(const char* tensor) const {
    const GgufEntry* const found = file_.find(tensor);
    if (found == nullptr) return {};
    QLORAPP_CHECK_FORMAT(found->type == GgufType::kF32 && found->shape.size() == 1,
                         "[{}] tensor {} must be one row of F32; it is not.", file_.path(), tensor);
    std::vector<float> values(static_cast<size_t>(found->shape[0]));
    file_.read(*found, 0, std::as_writable_bytes(std::span(values)));
    return {values.begin(), values.end()};
  }

  void add_rope() {
    const double theta = real("rope.freq_base", 10'000);
    Json rope{{"rope_theta", theta}, {"rope_type", "default"}};
    const auto width = maybe_whole("rope.dimension_count").value_or(head_dim_);
    if (width != head_dim_) json_["partial_rotary_factor"] = static_cast<double>(width) / static_cast<double>(head_dim_);
    const double factor = real("rope.scaling.factor", real("rope.scale_linear", 1));
    const std::string type =
        file_.get<std::string>(key("rope.scaling.type")).value_or(factor == 0 || factor == 1 ? "none" : "linear");
    const int64_t original =
        maybe_whole("rope.scaling.original_context_length").value_or(json_["max_position_embeddings"].get<int64_t>());
    if (const auto divisors = numbers("rope_freqs.weight"); !divisors.empty()) {
      set_longrope(rope, divisors, divisors, json_["max_position_embeddings"].get<int64_t>(), 1);
    } else if (has("rope_factors_long.weight")) {
      set_longrope(rope, numbers("rope_factors_short.weight"), numbers("rope_factors_long.weight"), original,
                   real("rope.scaling.attn_factor", 1));
    } else if (type == "linear") {
      rope["rope_type"] = "linear";
      rope["factor"] = factor;
    } else if (type == "yarn") {
      rope["rope_type"] = "yarn";
      rope["factor"] = factor;
      rope["original_max_position_embeddings"] = original;
      rope["beta_fast"] = real("rope.scaling.yarn_beta_fast", 32);
      rope["beta_slow"] = real("rope.scaling.yarn_beta_slow", 1);
      rope["attention_factor"] = real("rope.scaling.attn_factor", 1) * (0.1 * std::log(factor) + 1);
      if (const auto beta = file_.get<double>(key("attention.temperature_scale"))) rope["llama_4_scaling_beta"] = shortest(*beta);
    } else if (type != "none") {
      throw UnsupportedModel(
          message("[{}] rope.scaling.type must be none, linear, yarn or longrope; got '{}'.", file_.path(), type));
    }
    if (family_.rope_rule != RopeRule::kByLayerType) {
      json_["rope_parameters"] = rope;
      return;
    }
    const Json sliding{{"rope_theta", real("rope.freq_base_swa", 10'000)}, {"rope_type", "default"}};
    json_["rope_parameters"] = {{"full_attention", rope}, {"sliding_attention", sliding}};
  }

  void set_longrope(Json& rope, const std::vector<double>& small, const std::vector<double>& large, int64_t original,
                    double attention_factor) {
    rope["rope_type"] = "longrope";
    rope["short_factor"] = small;
    rope["long_factor"] = large;
    rope["attention_factor"] = attention_factor;
    rope["original_max_position_embeddings"] = original;
    if (json_.contains("original_max_position_embeddings") || !family_.longrope_names.empty())
      json_["original_max_position_embeddings"] = original;
  }

  void add_scales(int64_t width, int64_t heads) {
    const GgufRow& row = family_.gguf;
    if (row.has_multipliers) {
      json_["attention_multiplier"] = real("attention.scale", 1 / std::sqrt(static_cast<double>(head_dim_)));
      json_["embedding_multiplier"] = real("embedding_scale", 1);
      json_["residual_multiplier"] = real("residual_scale", 1);
      json_["logits_scaling"] = real("logit_scale", 1);
    }
    // Where queries are normed, the norm's weight has what the family scales by on top.
    if (accepts(family_, "query_pre_attn_scalar"))
      json_["query_pre_attn_scalar"] = row.wide_scale_depth > 0 && layers_ == row.wide_scale_depth ? width / heads : head_dim_;
    if (accepts(family_, "final_logit_softcapping")) {
      const auto cap = file_.get<double>(key("final_logit_softcapping"));
      json_["final_logit_softcapping"] = cap ? Json(shortest(*cap)) : Json(nullptr);
    }
  }

  void add_tokens() {
    const auto id = [&](const char* name, const char* theirs) {
      const auto found = file_.get<int64_t>(message("tokenizer.ggml.{}_token_id", theirs));
      if (found && *found >= 0 && *found < json_["vocab_size"].get<int64_t>()) json_[name] = *found;  // 2³²-1 is none
    };
    id("bos_token_id", "bos");
    id("eos_token_id", "eos");
    id("pad_token_id", "padding");
  }

  const GgufFile& file_;
  std::string architecture_;
  const Family& family_;
  int64_t head_dim_ = 0, layers_ = 0;
  Json json_;
};

}  // namespace

std::string gguf_config_json(const GgufFile& file) { return ConfigWriter(file).write().dump(2) + "\n"; }

}  // namespace qlorapp::format
