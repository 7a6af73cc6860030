// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/known_models.hpp"

#include <array>
#include <cctype>
#include <string_view>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "format/model_folder.hpp"
#include "format/tensor_files.hpp"

namespace qlorapp {
namespace {

/// As in their config.json on the hub.
struct Known {
  std::string_view name, model_type;
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, positions;
  bool tied;
  std::string_view eps, theta;
  std::string_view more = "";  ///< Further entries of the file.
};
constexpr std::string_view kGemma3 = R"(,"hidden_activation":"gelu_pytorch_tanh","sliding_window":512)";
/// Of 4B and more.
constexpr std::string_view kGemma3Long =
    R"(,"hidden_activation":"gelu_pytorch_tanh","sliding_window":1024,"rope_scaling":{"rope_type":"linear","factor":8.0})";
constexpr std::string_view kGemma27b =
    R"(,"hidden_activation":"gelu_pytorch_tanh","sliding_window":1024,"query_pre_attn_scalar":168,"rope_scaling":{"rope_type":"linear","factor":8.0})";
constexpr std::string_view kNoWindow = R"(,"sliding_window":null)";
constexpr std::string_view kGranite2b =
    R"(,"embedding_multiplier":12.0,"residual_multiplier":0.22,"attention_multiplier":0.015625,"logits_scaling":8.0)";
constexpr std::string_view kGranite8b =
    R"(,"embedding_multiplier":12.0,"residual_multiplier":0.22,"attention_multiplier":0.0078125,"logits_scaling":16.0)";
// clang-format off
constexpr auto kKnown = std::to_array<Known>({
    {"llama-3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, true, "1e-05", "500000.0"},
    {"llama-3.2-3b", "llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, true, "1e-05", "500000.0"},
    {"llama-3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 8192, false, "1e-05", "500000.0"},
    {"llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, false, "1e-05", "500000.0"},
    {"llama-3.1-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256, 131072, false, "1e-05", "500000.0"},
    {"llama-2-7b", "llama", 4096, 11008, 32, 32, 32, 128, 32000, 4096, false, "1e-05", "500000.0"},
    {"llama-2-13b", "llama", 5120, 13824, 40, 40, 40, 128, 32000, 4096, false, "1e-05", "500000.0"},
    {"tinyllama-1.1b", "llama", 2048, 5632, 22, 32, 4, 64, 32000, 2048, false, "1e-05", "500000.0"},
    {"qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, true, "1e-06", "1000000.0"},
    {"qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960, true, "1e-06", "1000000.0"},
    {"qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960, true, "1e-06", "1000000.0"},
    {"qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, false, "1e-06", "1000000.0"},
    {"qwen3-14b", "qwen3", 5120, 17408, 40, 40, 8, 128, 151936, 40960, false, "1e-06", "1000000.0"},
    {"qwen3-32b", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936, 40960, false, "1e-06", "1000000.0"},
    {"qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, true, "1e-06", "1000000.0"},
    {"qwen2.5-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768, true, "1e-06", "1000000.0"},
    {"qwen2.5-3b", "qwen2", 2048, 11008, 36, 16, 2, 128, 151936, 32768, true, "1e-06", "1000000.0"},
    {"qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, false, "1e-06", "1000000.0"},
    {"qwen2.5-14b", "qwen2", 5120, 13824, 48, 40, 8, 128, 152064, 32768, false, "1e-05", "1000000.0"},
    {"qwen2.5-32b", "qwen2", 5120, 27648, 64, 40, 8, 128, 152064, 32768, false, "1e-05", "1000000.0"},
    {"qwen2.5-72b", "qwen2", 8192, 29568, 80, 64, 8, 128, 152064, 32768, false, "1e-05", "1000000.0"},
    {"gemma-3-270m", "gemma3_text", 640, 2048, 18, 4, 1, 256, 262144, 32768, true, "1e-06", "1000000.0", kGemma3},
    {"gemma-3-1b", "gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768, true, "1e-06", "1000000.0", kGemma3},
    {"gemma-3-4b", "gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, 131072, true, "1e-06", "1000000.0", kGemma3Long},
    {"gemma-3-12b", "gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, 131072, true, "1e-06", "1000000.0", kGemma3Long},
    {"gemma-3-27b", "gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, 131072, true, "1e-06", "1000000.0", kGemma27b},
    {"mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, false, "1e-05", "1000000.0", kNoWindow},
    {"mistral-nemo-12b", "mistral", 5120, 14336, 40, 32, 8, 128, 131072, 131072, false, "1e-05", "1000000.0", kNoWindow},
    {"mistral-small-24b", "mistral", 5120, 32768, 40, 32, 8, 128, 131072, 32768, false, "1e-05", "100000000.0", kNoWindow},
    {"phi-3-mini", "phi3", 3072, 8192, 32, 32, 32, 96, 32064, 4096, false, "1e-05", "10000.0"},
    {"phi-4-mini", "phi3", 3072, 8192, 32, 24, 8, 128, 200064, 131072, true, "1e-05", "10000.0", R"(,"partial_rotary_factor":0.75)"},
    {"phi-4", "phi3", 5120, 17920, 40, 40, 10, 128, 100352, 16384, false, "1e-05", "250000.0"},
    {"granite-3.3-2b", "granite", 2048, 8192, 40, 32, 8, 64, 49159, 131072, true, "1e-05", "10000000.0", kGranite2b},
    {"granite-3.3-8b", "granite", 4096, 12800, 40, 32, 8, 128, 49159, 131072, true, "1e-05", "10000000.0", kGranite8b},
    {"smollm3-3b", "smollm3", 2048, 11008, 36, 16, 4, 128, 128256, 65536, true, "1e-06", "5000000.0"},
});
// clang-format on
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
        message(R"({{"model_type":"{}","hidden_size":{},"intermediate_size":{},"num_hidden_layers":{},"num_attention_heads":{},)"
                R"("num_key_value_heads":{},"head_dim":{},"vocab_size":{},"max_position_embeddings":{},"rms_norm_eps":{},)"
                R"("rope_theta":{},"tie_word_embeddings":{},"torch_dtype":"bfloat16"{}}})",
                known.model_type, known.hidden, known.intermediate, known.layers, known.heads, known.kv_heads, known.head_dim,
                known.vocabulary, known.positions, known.eps, known.theta, known.tied, known.more),
        known.name);
  }
  if (text.ends_with(".json")) return format::parse_model_config(files::FileReader(text).read_all(size_t{16} << 20), text);
  QLORAPP_CHECK_VALUE(files::exists(text), "[model] must be a folder with a config.json, such a file, or one of {}; got '{}'.{}",
                      joined(kNames), text, did_you_mean(lower(text), kNames));
  try {
    static_cast<void>(format::TensorFiles(text));
  } catch (const Error&) {
    return format::load_model_config(text);
  }  // weights that are not here, or not all, are planned as config.json says
  return format::settled_config(text);
}

}  // namespace qlorapp
