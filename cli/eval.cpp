// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>

#include "command.hpp"
#include "core/check.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/train/evaluate.hpp"

namespace qlorapp::cli {

int eval(const Arguments& arguments) {
  ModelOptions model_options;
  std::string data, adapter;
  DatasetOptions rows;
  RowOptions row_options;
  EvalOptions options;
  options.exact_match = true;
  CommandLine line("eval", "--model DIR --data FILE [--adapter DIR]",
                   "Computes the loss over held-out rows and the share of answers that match exactly.");
  model_options.add_loading_to(line);
  model_options.add_template_to(line);
  line.option("data", data, "rows: FILE[,FILE …], in the formats of train", true);
  row_options.add_to(line);
  line.option("adapter", adapter, "PEFT adapter folder; without it the base model is evaluated");
  line.option("per_device_eval_batch_size", options.batch_size, "rows per batch");
  line.option("max_length", rows.max_length, "rows are cut to this many tokens");
  line.option("completion_only_loss", rows.completion_only_loss, "score completions only; unset: if the rows have prompts");
  line.option("assistant_only_loss", rows.assistant_only_loss,
              "messages: score the assistant's turns only; unset: where they can be found");
  line.group("Model", {"model", "adapter", "device", "dtype", "quant_type", "double_quant", "block_size", "load_in_4bit"});
  line.group("Data", {"data", "data_format", "dataset_text_field", "prompt_column", "completion_column", "messages_column",
                      "chat_template", "max_length", "completion_only_loss", "assistant_only_loss", "per_device_eval_batch_size"});
  line.parse(arguments);
  row_options.apply_to(rows);
  model_options.open();
  rows.prefer_assistant_only = !line.given("assistant_only_loss");
  QLORAPP_CHECK_VALUE(options.batch_size >= 1, "[per_device_eval_batch_size] must be an integer >= 1; got {}.", options.batch_size);

  const format::ModelConfig config = model_options.config();
  check_adapter_folder("adapter", adapter);
  rows.model_vocab_size = adapter.empty() ? config.vocab_size : adapter_vocab_size(adapter, config.vocab_size);
  const ComputeDtype computed = model_options.choose_dtype(config);
  log_info(
      message("model: {}, {}; computes in {}", model_options.model, model_options.storage_text(line, config), computed.reason));
  FolderText tools = model_options.text_tools(adapter);
  const Dataset dataset = read_rows(data, rows, tools, Split::kEval);
  CausalLM model = model_options.load(computed.dtype);
  if (!adapter.empty()) load_adapter(model, adapter);
  ProgressBar bar("evaluating");
  const auto batches = static_cast<int64_t>((dataset.examples.size() + static_cast<size_t>(options.batch_size) - 1) /
                                            static_cast<size_t>(options.batch_size));
  int64_t done = 0;
  options.after_each_batch = [&] { bar.update(++done, batches); };
  const EvalResult result = evaluate(model, dataset.examples, options);
  bar.line(message("eval_loss {}   (mean over {} target tokens)", result.token_weighted, result.target_tokens));
  bar.line(message("perplexity {}", std::exp(result.token_weighted)));
  if (result.prompted_rows > 0) {
    bar.line(message("exact_match {}   ({} of {} answers)",
                     static_cast<double>(result.exact_matches) / static_cast<double>(result.prompted_rows), result.exact_matches,
                     result.prompted_rows));
  }
  return 0;
}

}  // namespace qlorapp::cli
