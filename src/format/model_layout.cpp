// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/model_layout.hpp"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "core/check.hpp"

namespace qlorapp::format {
namespace {

int64_t extent(const ModelConfig& config, Size size) {
  switch (size) {
    case Size::kHidden:
      return config.hidden_size;
    case Size::kQueries:
      return config.num_attention_heads * config.head_dim;
    case Size::kKeys:
      return config.num_key_value_heads * config.head_dim;
    case Size::kInner:
      return config.intermediate_size;
  }
  throw Error("[model] a size without a meaning");
}

}  // namespace

int64_t Parameter::numel() const {
  int64_t count = 1;  // the bounds of a config keep it below 2^55
  for (const int64_t size : shape) count *= size;
  return count;
}

std::vector<Parameter> parameters(const ModelConfig& config) {
  const std::vector<int64_t> table{config.vocab_size, config.hidden_size};
  std::vector<Parameter> all{{"model.embed_tokens", table, Role::kEmbedding}};
  if (!config.tie_word_embeddings) all.push_back({"lm_head", table, Role::kHead});
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    std::map<Role, size_t> slots;
    for (const BlockRow& row : config.family->block) {
      std::vector<int64_t> shape{extent(config, row.out)};
      if (row.role == Role::kLinear) shape.push_back(extent(config, row.in));
      all.push_back({message("model.layers.{}.{}", layer, row.path), std::move(shape), row.role, layer, slots[row.role]++});
    }
  }
  all.push_back({"model.norm", {config.hidden_size}, Role::kNorm});
  return all;
}

std::vector<Parameter> parameters(const ModelConfig& config, Role role) {
  std::vector<Parameter> some = parameters(config);
  std::erase_if(some, [&](const Parameter& parameter) { return parameter.role != role; });
  return some;
}

size_t slots(const ModelConfig& config, Role role) {
  const std::span<const BlockRow> rows = config.family->block;
  return static_cast<size_t>(std::count_if(rows.begin(), rows.end(), [&](const BlockRow& row) { return row.role == role; }));
}

std::vector<std::string> linear_words(const ModelConfig& config) {
  std::vector<std::string> words;
  for (const BlockRow& row : config.family->block) {
    if (row.role == Role::kLinear) words.emplace_back(row.path.substr(row.path.rfind('.') + 1));
  }
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
