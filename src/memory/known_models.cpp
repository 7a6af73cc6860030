// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/known_models.hpp"

#include <array>
#include <cctype>
#include <string_view>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "format/checkpoint_index.hpp"
#include "format/file_reader.hpp"
#include "format/folder.hpp"
#include "format/model_folder.hpp"

namespace qlorapp {
namespace {

/// As in their config.json on the hub.
struct Known {
  std::string_view name, model_type, architecture;
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, positions;
  bool tied;
  std::string_view eps, theta;
};
constexpr auto llama(std::string_view name, int64_t hidden, int64_t intermediate, int64_t layers, int64_t heads, int64_t kv_heads,
                     int64_t head_dim, int64_t vocabulary, int64_t positions, bool tied) {
  return Known{name,     "llama",  "LlamaForCausalLM", hidden,    intermediate, layers,  heads,
               kv_heads, head_dim, vocabulary,         positions, tied,         "1e-05", "500000.0"};
}
constexpr auto qwen3(std::string_view name, int64_t hidden, int64_t intermediate, int64_t layers, int64_t heads, bool tied) {
  return Known{name, "qwen3", "Qwen3ForCausalLM", hidden, intermediate, layers, heads, 8, 128, 151936, 40960,
               tied, "1e-06", "1000000.0"};
}
constexpr std::array kKnown{llama("llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, 131072, true),
                            llama("llama-3.2-3b", 3072, 8192, 28, 24, 8, 128, 128256, 131072, true),
                            llama("llama-3-8b", 4096, 14336, 32, 32, 8, 128, 128256, 8192, false),
                            llama("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, 131072, false),
                            llama("llama-3.1-70b", 8192, 28672, 80, 64, 8, 128, 128256, 131072, false),
                            llama("llama-2-7b", 4096, 11008, 32, 32, 32, 128, 32000, 4096, false),
                            llama("llama-2-13b", 5120, 13824, 40, 40, 40, 128, 32000, 4096, false),
                            llama("tinyllama-1.1b", 2048, 5632, 22, 32, 4, 64, 32000, 2048, false),
                            qwen3("qwen3-0.6b", 1024, 3072, 28, 16, true),
                            qwen3("qwen3-1.7b", 2048, 6144, 28, 16, true),
                            qwen3("qwen3-4b", 2560, 9728, 36, 32, true),
                            qwen3("qwen3-8b", 4096, 12288, 36, 32, false),
                            qwen3("qwen3-14b", 5120, 17408, 40, 40, false),
                            qwen3("qwen3-32b", 5120, 25600, 64, 64, false)};
constexpr auto kNames = [] {
  std::array<std::string_view, kKnown.size()> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kKnown[i].name;
  return names;
}();

std::string lower(std::string_view text) {
  std::string result;
  for (const char c : text) result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

format::ModelConfig find_model_config(const std::string& text) {
  for (const Known& known : kKnown) {
    if (lower(text) != known.name) continue;
    return format::parse_model_config(
        message(
            R"({{"architectures":["{}"],"model_type":"{}","hidden_act":"silu","hidden_size":{},"intermediate_size":{},)"
            R"("num_hidden_layers":{},"num_attention_heads":{},"num_key_value_heads":{},"head_dim":{},"vocab_size":{},)"
            R"("max_position_embeddings":{},"rms_norm_eps":{},"rope_theta":{},"tie_word_embeddings":{},"torch_dtype":"bfloat16"}})",
            known.architecture, known.model_type, known.hidden, known.intermediate, known.layers, known.heads, known.kv_heads,
            known.head_dim, known.vocabulary, known.positions, known.eps, known.theta, known.tied),
        known.name);
  }
  if (text.ends_with(".json")) return format::parse_model_config(format::FileReader(text).read_all(size_t{16} << 20), text);
  QLORAPP_CHECK_VALUE(format::exists(text), "[model] must be a folder with a config.json, such a file, or one of {}; got '{}'.{}",
                      joined(kNames), text, did_you_mean(lower(text), kNames));
  try {
    static_cast<void>(format::Checkpoint(text));
  } catch (const Error&) {
    return format::load_model_config(text);
  }  // weights that are not here, or not all, are planned as config.json says
  return format::settled_config(text);
}

}  // namespace qlorapp
