// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/adapters/parameter_count.hpp"

#include <array>
#include <cstdio>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

/// 1234567 → "1,234,567".
std::string with_commas(int64_t number) {
  std::string text = std::to_string(number);
  for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

}  // namespace

ParameterCount count_parameters(const format::ModelConfig& model, const LoraConfig& given) {
  given.validate();
  const LoraConfig lora = given.for_model(model);
  ParameterCount count{0, format::parameter_count(model)};
  for (const format::Parameter& layer : format::parameters(model, format::Role::kLinear)) {
    if (!lora.matches(layer.module)) continue;
    count.trainable += lora.rank_of(layer.module) * (layer.shape[0] + layer.shape[1]) + (lora.use_dora ? layer.shape[0] : 0);
  }
  QLORAPP_CHECK_VALUE(count.trainable > 0, "[lora] target_modules names no linear layer of this model.");
  const int64_t tables =
      static_cast<int64_t>(lora.saves(format::embedding_module(model))) + static_cast<int64_t>(lora.saves(format::kHeadModule));
  const bool shared = model.tie_word_embeddings && lora.ensure_weight_tying && tables > 0;
  count.trainable += (shared ? 1 : tables) * model.vocab_size * model.hidden_size;
  count.all += count.trainable;
  return count;
}

std::string trainable_parameters_line(const ParameterCount& count) {
  const double percent = count.all == 0 ? 0.0 : 100.0 * static_cast<double>(count.trainable) / static_cast<double>(count.all);
  std::array<char, 32> share{};
  std::snprintf(share.data(), share.size(), "%.4f", percent);
  return message("trainable params: {} || all params: {} || trainable%: {}", with_commas(count.trainable), with_commas(count.all),
                 std::string_view(share.data()));
}

}  // namespace qlorapp
