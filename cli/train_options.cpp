// SPDX-License-Identifier: Apache-2.0
#include "train_options.hpp"

#include <cstdio>

#include "command.hpp"
#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "training_options.hpp"

namespace qlorapp::cli {
namespace {

void add_help_groups(CommandLine& line) {
  line.group("Model", {"model", "defaults", "device", "dtype", "load_in_4bit"});
  line.group("Data", {"data", "eval_data", "data_format", "dataset_text_field", "prompt_column", "completion_column",
                      "chat_template", "val_size", "max_length", "packing", "completion_only_loss", "assistant_only_loss"});
  line.group("Output", {"output", "overwrite_output_dir", "resume_from_checkpoint", "init_adapter", "dry_run"});
  group_training_fields(line);
  line.group("Logging, evaluation, checkpoints",
             {"logging_steps", "eval_strategy", "eval_steps", "per_device_eval_batch_size", "eval_generate", "save_strategy",
              "save_steps", "save_total_limit", "load_best_model_at_end", "report_to"});
}

}  // namespace

void add_train_options(CommandLine& line, TrainOptions& options) {
  options.model.add_loading_to(line);
  options.model.add_template_to(line);
  line.option("data", options.data, "rows to train on: FILE[,FILE …], .jsonl, .json, .csv, .tsv or .txt, also .gz (docs/sft.md)",
              true);
  line.option("output", options.output, "folder for the adapter, checkpoints and trainer_state.json", true);
  line.alias("output_dir", "output");
  line.option("eval_data", options.eval_data, "rows to evaluate on, once per epoch unless --eval_strategy is given");
  options.rows.add_to(line);
  line.option("init_adapter", options.init_adapter, "PEFT adapter folder to continue from; its config sets the adapter options");
  line.option("report_to", options.reports.report_to, "tensorboard (event files), wandb, trackio (their Python packages)");
  line.option("logging_dir", options.reports.logging_dir, "folder of TensorBoard's event files; default: OUTPUT/runs");
  line.option("run_name", options.reports.run_name, "of the run in wandb and trackio; default: the output folder");
  line.option("project", options.reports.project, "of wandb and trackio");
  line.option("dry_run", options.dry_run, "print the memory plan for the given rows and exit without loading the model");
  options.defaults.add_to(line, options.args, options.lora);
  line.fields(options.args);
  line.fields(options.lora);
  line.unused(unused_training_arguments());
  line.unused(unused_lora_options());
  add_help_groups(line);
}

int init_config(const Arguments& arguments) {
  std::string output;
  CommandLine own("init-config", "[--output FILE]", "Writes the options of train, with comments, as a YAML file for --config.");
  own.option("output", output, "new file, .yaml or .yml; default: standard output");
  own.parse(arguments);
  TrainOptions options;
  CommandLine line("train", "", "");
  add_train_options(line, options);
  const std::string text = line.config_template({"bf16", "fp16"});
  if (output.empty()) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return 0;
  }
  QLORAPP_CHECK_VALUE(output.ends_with(".yaml") || output.ends_with(".yml"), "[output] must end with .yaml or .yml; got '{}'.",
                      output);
  QLORAPP_CHECK_VALUE(!files::exists(output), "[output] {} is there already. Give another name.", output);
  files::write_file_atomically(output, text);
  return 0;
}

}  // namespace qlorapp::cli
