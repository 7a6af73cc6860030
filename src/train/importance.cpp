// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/importance.hpp"

#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "core/check.hpp"
#include "format/model_folder.hpp"
#include "nn/input_squares.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"
#include "qlorapp/train/evaluate.hpp"

namespace qlorapp {

Importance measure_importance(CausalLM& model, const std::vector<Example>& rows) {
  const auto squares = std::make_shared<InputSquares>();
  model.settings().observe(squares);
  try {
    static_cast<void>(evaluate(model, rows, {}));
  } catch (...) {
    model.settings().observe(nullptr);
    throw;
  }
  model.settings().observe(nullptr);
  Importance found;
  for (const format::Parameter& linear : format::parameters(model.config(), format::Role::kLinear)) {
    const at::Tensor mean = squares->mean(linear.layer, linear.slot);
    if (!mean.defined()) continue;
    const at::Tensor values = mean.to(at::kFloat).contiguous();
    const auto* const first = values.const_data_ptr<float>();
    found[linear.name()].assign(first, first + values.numel());
  }
  return found;
}

Importance measure_importance(const std::string& model, const std::string& adapter, const std::string& data,
                              const ImportanceOptions& options) {
  QLORAPP_CHECK_VALUE(options.most_rows >= 1, "[importance] most_rows must be at least 1; got {}.", options.most_rows);
  const format::ModelConfig config = format::settled_config(model);
  const std::string text = !adapter.empty() && TextFiles::has_tokenizer(adapter) ? adapter : model;
  Tokenizer tokenizer = Tokenizer::from_folder(text, model);
  const std::optional<ChatTemplate> chat = ChatTemplate::from_folder(text);
  DatasetOptions reading;
  reading.max_length = options.max_length;
  reading.model_vocab_size = adapter.empty() ? config.vocab_size : adapter_vocab_size(adapter, config.vocab_size);
  std::vector<Example> rows = Dataset::read(data, reading, &tokenizer, chat ? &*chat : nullptr).examples;
  if (std::ssize(rows) > options.most_rows) {
    std::vector<Example> some;
    for (int64_t i = 0; i < options.most_rows; ++i)
      some.push_back(std::move(rows[static_cast<size_t>(i * std::ssize(rows) / options.most_rows)]));
    rows = std::move(some);
  }
  LoadOptions load;
  load.device = options.device;
  load.load_in_4bit = options.load_in_4bit && config.blocks.empty();
  CausalLM loaded = load_model(model, load);
  if (!adapter.empty()) load_adapter(loaded, adapter);
  return measure_importance(loaded, rows);
}

}  // namespace qlorapp
