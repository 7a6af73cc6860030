// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>

#include "command.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/train/evaluate.hpp"

namespace qlorapp::cli {

int eval(const Arguments& arguments) {
  ModelOptions model_options;
  std::string data, adapter, dtype = "float32";
  DatasetOptions rows;
  EvalOptions options;
  options.exact_match = true;
  CommandLine line("eval", "Loss over held-out rows, and how many answers are right token by token.");
  model_options.add_to(line);
  model_options.add_template_to(line);
  line.option("data", data, "rows: .jsonl or .json", true);
  line.option("adapter", adapter, "PEFT adapter folder; without it the base model is evaluated");
  line.option("dtype", dtype, "of the computation: float32, bfloat16 or float16");
  line.option("per_device_eval_batch_size", options.batch_size, "rows of a batch");
  line.option("max_length", rows.max_length, "rows are cut to this many tokens");
  line.option("completion_only_loss", rows.completion_only_loss, "score completions only; unset: where the rows have prompts");
  line.option("assistant_only_loss", rows.assistant_only_loss, "messages: score the assistant's turns only");
  line.parse(arguments);
  QLORAPP_CHECK_VALUE(options.batch_size >= 1, "[per_device_eval_batch_size] must be an integer >= 1; got ", options.batch_size,
                      ".");

  rows.model_vocab_size = format::load_model_config(model_options.model).vocab_size;
  FolderText tools = model_options.text_tools();
  const Dataset dataset = read_rows(data, rows, tools);
  CausalLM model = model_options.load(parse_dtype(dtype));
  if (!adapter.empty()) load_adapter(model, adapter);
  ProgressBar bar("evaluating");
  const auto batches = static_cast<int64_t>((dataset.examples.size() + static_cast<size_t>(options.batch_size) - 1) /
                                            static_cast<size_t>(options.batch_size));
  int64_t done = 0;
  options.after_each_batch = [&] { bar.update(++done, batches); };
  const EvalResult result = evaluate(model, dataset.examples, options);
  bar.line(concat("eval_loss ", result.token_weighted, "   (mean over ", result.target_tokens, " target tokens)"));
  bar.line(concat("perplexity ", std::exp(result.token_weighted)));
  if (result.prompted_rows > 0) {
    bar.line(concat("exact_match ", static_cast<double>(result.exact_matches) / static_cast<double>(result.prompted_rows), "   (",
                    result.exact_matches, " of ", result.prompted_rows, " answers)"));
  }
  return 0;
}

}  // namespace qlorapp::cli
