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
struct Shape {
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, positions;
  bool tied;
};
constexpr std::array<std::string_view, 8> kNames{"llama-3.2-1b",  "llama-3.2-3b", "llama-3-8b",  "llama-3.1-8b",
                                                 "llama-3.1-70b", "llama-2-7b",   "llama-2-13b", "tinyllama-1.1b"};
constexpr std::array<Shape, kNames.size()> kShapes{{{2048, 8192, 16, 32, 8, 64, 128256, 131072, true},
                                                    {3072, 8192, 28, 24, 8, 128, 128256, 131072, true},
                                                    {4096, 14336, 32, 32, 8, 128, 128256, 8192, false},
                                                    {4096, 14336, 32, 32, 8, 128, 128256, 131072, false},
                                                    {8192, 28672, 80, 64, 8, 128, 128256, 131072, false},
                                                    {4096, 11008, 32, 32, 32, 128, 32000, 4096, false},
                                                    {5120, 13824, 40, 40, 40, 128, 32000, 4096, false},
                                                    {2048, 5632, 22, 32, 4, 64, 32000, 2048, false}}};

std::string lower(std::string_view text) {
  std::string result;
  for (const char c : text) result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

format::ModelConfig find_model_config(const std::string& text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (lower(text) != kNames[i]) continue;
    const Shape& s = kShapes[i];
    return format::parse_model_config(
        message(
            R"({{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","hidden_size":{},)"
            R"("intermediate_size":{},"num_hidden_layers":{},"num_attention_heads":{},"num_key_value_heads":{},"head_dim":{},)"
            R"("vocab_size":{},"max_position_embeddings":{},"rms_norm_eps":1e-05,"rope_theta":500000.0,"tie_word_embeddings":{},)"
            R"("torch_dtype":"bfloat16"}})",
            s.hidden, s.intermediate, s.layers, s.heads, s.kv_heads, s.head_dim, s.vocabulary, s.positions, s.tied),
        kNames[i]);
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
