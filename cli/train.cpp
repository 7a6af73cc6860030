// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "command.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/format/folder.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/checkpoint_folder.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/linear_weight.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/trainer.hpp"

namespace qlorapp::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

/// The first Ctrl-C asks for an end after this step, with a checkpoint; the second ends the process.
void on_interrupt(int) {
  g_interrupted = 1;
  std::signal(SIGINT, SIG_DFL);
}

struct TrainOptions {
  ModelOptions model;
  std::string data, output, eval_data, init_adapter;
  bool assistant_only_loss = false, dry_run = false;
  TrainingArguments args;
  LoraConfig lora;
};

/// Options that Python's Trainer acts on and this command cannot: said, not dropped.
void say_what_is_pythons(const CommandLine& line, const TrainingArguments& args) {
  for (const char* name :
       {"do_train", "do_eval", "do_predict", "remove_unused_columns", "log_level", "disable_tqdm", "prediction_loss_only",
        "eval_do_concat_batches", "batch_eval_metrics", "include_for_metrics", "include_inputs_for_metrics",
        "enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "skip_memory_metrics"}) {
    if (line.given(name))
      log_warning(concat("[train] --", name, " has no effect on the command line: it is about Python's Trainer."));
  }
  constexpr auto kPythonReports =
      " has no effect on the command line: Python's Trainer reports to services. log_history in trainer_state.json has every "
      "value.";
  for (const std::string& name : args.report_to) {
    if (name != "none") log_warning(concat("[train] --report_to ", name, kPythonReports));
  }
  for (const char* name :
       {"logging_dir", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}) {
    if (line.given(name)) log_warning(concat("[train] --", name, kPythonReports));
  }
}

TrainOptions parse(const Arguments& arguments) {
  TrainOptions options;
  options.args.output_dir.clear();
  CommandLine line("train", "Fine-tunes low-rank adapters on a 4-bit base and writes a PEFT adapter folder.");
  options.model.add_to(line);
  line.option("data", options.data, "rows to train on: .jsonl or .json of text, prompt/completion, messages or input_ids", true);
  line.option("output", options.output, "folder for the adapter, checkpoints and trainer_state.json", true);
  line.option("eval_data", options.eval_data, "rows to evaluate on");
  line.option("init_adapter", options.init_adapter, "PEFT adapter folder to go on from");
  line.option("assistant_only_loss", options.assistant_only_loss, "messages: train on the assistant's turns only");
  line.option("dry_run", options.dry_run, "say what the run would take, over the rows given, and end before anything is loaded");
  line.fields(options.args);
  line.fields(options.lora);
  line.parse(arguments);
  options.args.output_dir = options.output;
  options.args.validate();
  say_what_is_pythons(line, options.args);
  options.lora.validate();
  QLORAPP_CHECK_VALUE(
      options.init_adapter.empty() || !(line.given("r") || line.given("target_modules") || line.given("lora_alpha")),
      "[train] --init_adapter brings its own r, lora_alpha and target_modules; leave those options out.");
  if (!options.eval_data.empty() && !line.given("eval_strategy")) options.args.eval_strategy = "epoch";
  if (options.args.use_cpu) options.model.device = "cpu";
  return options;
}

/// The checkpoint to go on from, if any. "true" is the newest in the output folder.
std::optional<std::string> checkpoint_to_resume(const TrainOptions& options) {
  const auto& wanted = options.args.resume_from_checkpoint;
  if (!wanted || *wanted == "false") return std::nullopt;
  if (*wanted != "true") return wanted;
  const auto newest = latest_checkpoint(options.output);
  QLORAPP_CHECK_VALUE(newest.has_value(), "[resume_from_checkpoint] there is no checkpoint in ", options.output,
                      ". Leave the option out to begin anew, or name a checkpoint folder.");
  return newest;
}

/// Another run's work is never written over by accident.
void check_output(const TrainOptions& options, bool resuming) {
  format::check_output_folder(options.output);
  if (resuming || options.args.overwrite_output_dir) return;
  const bool used = format::exists(format::path_in(options.output, "trainer_state.json")) ||
                    !list_checkpoints(options.output).empty() ||
                    format::exists(format::path_in(options.output, "adapter_model.safetensors"));
  QLORAPP_CHECK_VALUE(
      !used, "[output] ", options.output,
      " holds another run. Name a new folder, go on with --resume_from_checkpoint, or give --overwrite_output_dir.");
}

at::ScalarType compute_dtype(const TrainingArguments& args) {
  switch (args.precision()) {
    case Precision::kBf16:
      return at::kBFloat16;
    case Precision::kFp16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

DatasetOptions dataset_options(const TrainOptions& options, int64_t vocab_size, bool packed) {
  DatasetOptions rows;
  // The strategies that lose nothing cut rows themselves (data/packing.hpp).
  rows.max_length = packed && options.args.packing_strategy != "bfd" ? 0 : options.args.max_length;
  rows.completion_only_loss = options.args.completion_only_loss;
  rows.assistant_only_loss = options.assistant_only_loss;
  rows.model_vocab_size = vocab_size;
  return rows;
}

Bytes peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {static_cast<int64_t>(usage.ru_maxrss) * 1024};
}

/// The plan for the longest row of the data. Nothing is loaded. @returns whether it fits.
bool print_plan(const TrainOptions& options, const format::ModelConfig& config, const Dataset& train_data,
                const Dataset& eval_data) {
  PlanSettings settings = plan_settings(config, options.lora, options.args);
  settings.quantization = options.model.quantization();
  settings.length = 2;
  for (const Dataset* data : {&train_data, &eval_data}) {
    for (const Example& row : data->examples)
      settings.length = std::max(settings.length, static_cast<int64_t>(row.input_ids.size()));
  }
  if (eval_data.examples.empty()) settings.eval_batch = 0;
  const at::Device device = parse_device(options.model.device);
  settings.device = planned_device(device);
  settings.compute_dtype = usable_dtype(settings.compute_dtype, settings.device.architecture);
  const Bytes room = memory_for(device);  // once: what is free changes while one looks
  const FittedArguments fitted =
      fit_arguments(settings, options.args, rates_of(gpu_name(device), settings.device.architecture, {}), room);
  if (!fitted.text.empty()) std::printf("%s\n\n", fitted.text.c_str());
  const MemoryPlan plan = plan_memory_in(fitted.settings, room);
  std::printf("%s\n%s\n%s\n%s\n", summary_line(plan, fitted.settings).c_str(), phase_table(plan).c_str(),
              checklist(plan, fitted.settings).c_str(), verdict(plan, room).c_str());
  return plan.fits;
}

TrainerCallbacks callbacks(ProgressBar& bar) {
  TrainerCallbacks result;
  result.on_log = [&bar](const LogRecord& record, TrainerControl&) { bar.line(record.to_line()); };
  result.on_event = [&bar](TrainerEvent event, const TrainState& state, TrainerControl& control) {
    if (event == TrainerEvent::kStepEnd) {
      bar.update(state.global_step, state.schedule.training_steps);
      if (g_interrupted) {
        control.should_save = true;
        control.should_training_stop = true;
      }
    } else if (event == TrainerEvent::kEpochEnd && g_interrupted && state.global_step < state.schedule.training_steps) {
      control.should_log = control.should_evaluate = control.should_save = false;  // the checkpoint of that step is there
    }
  };
  result.on_save = [&bar](const std::string& folder, TrainerControl&) { bar.line("saved " + folder); };
  return result;
}

}  // namespace

int train(const Arguments& arguments) {
  const TrainOptions options = parse(arguments);
  const std::optional<std::string> resume_from = checkpoint_to_resume(options);
  check_output(options, resume_from.has_value());
  const format::ModelConfig config = format::load_model_config(options.model.model);

  std::optional<TextTools> tools;
  const auto read = [&](const std::string& path, bool packed) {
    return read_rows(path, dataset_options(options, config.vocab_size, packed), options.model.model, tools);
  };
  const Dataset train_data = read(options.data, options.args.packing);
  Dataset eval_data;
  if (!options.eval_data.empty()) eval_data = read(options.eval_data, options.args.eval_packing.value_or(options.args.packing));
  if (tools && tools->tokenizer)
    log_info(concat("first row, «trained»: ", render_sample(train_data.examples.front(), *tools->tokenizer)));

  if (options.dry_run) return print_plan(options, config, train_data, eval_data) ? 0 : kDoesNotFit;
  // Under a budget the table goes to the host first: the smallest way to load. What is chosen then may bring it back.
  const bool embedding_on_host = options.args.embedding_on_host || !options.args.memory_budget.empty();
  CausalLM model = options.model.load(compute_dtype(options.args), embedding_on_host);
  if (options.init_adapter.empty()) {
    model.add_adapters(options.lora, static_cast<uint64_t>(options.args.seed), kDefaultAdapter,
                       checkpoint_weights(options.model.model));
  } else {
    load_adapter(model, options.init_adapter);
  }
  const int64_t trainable = model.arena().numel(), all = model.base_parameter_count() + trainable;
  log_info(concat("model: ", to_string(model.weight_bytes()), " in memory; trainable params: ", trainable, " of ", all));

  remove_stale_checkpoints(options.output);
  ProgressBar bar("training");
  Trainer trainer(model, options.args, train_data.examples, eval_data.examples, options.model.model, callbacks(bar));
  log_info(concat(trainer.max_steps(), " steps of ", trainer.args().per_device_train_batch_size, " x ",
                  trainer.args().gradient_accumulation_steps, " rows", resume_from ? " from " + *resume_from : std::string()));
  std::signal(SIGINT, on_interrupt);
  const TrainOutput output = trainer.train(resume_from);
  if (g_interrupted && output.global_step < trainer.max_steps()) {
    bar.line(concat("interrupted after step ", output.global_step, "; go on with --resume_from_checkpoint"));
    return 130;
  }
  trainer.save_model(options.output);
  log_info(concat("adapter written to ", options.output, "; peak memory ", to_string(peak_memory())));
  return 0;
}

}  // namespace qlorapp::cli
