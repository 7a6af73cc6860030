// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/model_layout.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace qlorapp::format {
namespace {

int64_t extent(const ModelConfig& config, Size size) {
  switch (size) {
    case Size::kHidden:
      return config.hidden_size;
    case Size::kHead:
      return config.head_dim;
    case Size::kQueries:
      return config.num_attention_heads * config.head_dim;
    case Size::kKeys:
      return config.num_key_value_heads * config.head_dim;
    case Size::kAllHeads:
      return (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim;
    case Size::kInner:
      return config.intermediate_size;
    case Size::kTwoInner:
      return 2 * config.intermediate_size;
  }
  throw Error("[model] a size without a meaning");
}

bool has_bias(const ModelConfig& config, const LinearRow& row) {
  switch (row.bias) {
    case Bias::kNone:
      return false;
    case Bias::kAlways:
      return true;
    case Bias::kAttentionBias:
      return config.attention_bias;
    case Bias::kAttentionOutBias:
      return config.attention_out_bias;
    case Bias::kUseBias:
      return config.use_bias;
    case Bias::kMlpBias:
      return config.mlp_bias;
  }
  throw Error("[model] a bias without a meaning");
}

}  // namespace

int64_t Parameter::numel() const {
  int64_t count = 1;  // the bounds of a config keep it below 2^55
  for (const int64_t size : shape) count *= size;
  return count;
}

std::string embedding_module(const ModelConfig& config) { return config.body() + "embed_tokens"; }

std::vector<Parameter> parameters(const ModelConfig& config) {
  const std::vector<int64_t> table{config.vocab_size, config.hidden_size};
  const Family& family = *config.family;
  const std::string body = config.body();
  std::vector<Parameter> all{{embedding_module(config), table, Role::kEmbedding}};
  if (!config.tie_word_embeddings) all.push_back({std::string(kHeadModule), table, Role::kHead});
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    size_t slot = 0;
    const auto add = [&](std::string_view path, std::vector<int64_t> shape, Role role) {
      all.push_back({message("{}layers.{}.{}", body, layer, path), std::move(shape), role, layer, slot++});
    };
    for (const NormRow& row : family.norms) add(row.path, {extent(config, row.width)}, Role::kNorm);
    for (const LinearRow& row : family.linears) {
      if (has_bias(config, row)) add(row.path, {extent(config, row.out)}, Role::kBias);
    }
    slot = 0;
    for (const LinearRow& row : family.linears) add(row.path, {extent(config, row.out), extent(config, row.in)}, Role::kLinear);
  }
  all.push_back({body + "norm", {config.hidden_size}, Role::kNorm});
  return all;
}

std::vector<Parameter> parameters(const ModelConfig& config, Role role) {
  std::vector<Parameter> some = parameters(config);
  std::erase_if(some, [&](const Parameter& parameter) { return parameter.role != role; });
  return some;
}

std::vector<std::optional<size_t>> bias_slots(const ModelConfig& config) {
  size_t next = config.family->norms.size();
  std::vector<std::optional<size_t>> slots;
  for (const LinearRow& row : config.family->linears) slots.push_back(has_bias(config, row) ? std::optional(next++) : std::nullopt);
  return slots;
}

std::vector<std::string> linear_words(const ModelConfig& config) {
  std::vector<std::string> words;
  for (const LinearRow& row : config.family->linears) words.emplace_back(row.path.substr(row.path.rfind('.') + 1));
  return words;
}

int64_t parameter_count(const ModelConfig& config) {
  int64_t count = 0;
  for (const Parameter& parameter : parameters(config)) {
    QLORAPP_CHECK_VALUE(!__builtin_add_overflow(count, parameter.numel(), &count),
                        "[model] the number of parameters must be below 2^63; it is not.");
  }
  return count;
}

}  // namespace qlorapp::format
