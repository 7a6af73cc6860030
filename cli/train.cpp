// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include "answer_report.hpp"
#include "command.hpp"
#include "command_defaults.hpp"
#include "core/check.hpp"
#include "data/split_rows.hpp"
#include "files/folder.hpp"
#include "io/checkpoint_folder.hpp"
#include "io/linear_weight.hpp"
#include "model_options.hpp"
#include "nn/decoder.hpp"
#include "progress.hpp"
#include "qlorapp/adapters/parameter_count.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/compute_dtype.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/gguf.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/trainer.hpp"
#include "run_report.hpp"
#include "stop_signals.hpp"
#include "train/loss_trend.hpp"
#include "train_options.hpp"
#include "training_options.hpp"

namespace qlorapp::cli {
namespace {

struct Run {
  TrainOptions options;
  format::ModelConfig config;
  ComputeDtype computed;
  std::string storage;  ///< How the linear layers are stored.
};

/// Each process of a machine has its own GPU.
std::string device_of_rank(const std::string& device, const Launch& launch) {
  QLORAPP_CHECK_VALUE(!device.starts_with("cuda:"),
                      "[device] each of {} processes has a GPU of its own, by LOCAL_RANK; got '{}'. Give --device cuda.",
                      launch.size, device);
  if (device == "cpu" || (device == "auto" && !has_gpu())) return "cpu";
  return message("cuda:{}", launch.local_rank);
}

/// Rank 0 speaks for all. The others say what goes wrong.
void speak_as(const Communicator& ranks) {
  if (ranks.is_first()) return;
  set_log_sink([rank = ranks.rank()](LogLevel level, std::string_view line) {
    if (level == LogLevel::kWarning) print_line(stderr, message("warning: [rank {}] {}", rank, line));
  });
}

void check_val_size(const TrainOptions& options) {
  const TrainingArguments& args = options.args;
  if (args.val_size == 0) return;
  QLORAPP_CHECK_VALUE(
      options.eval_data.empty(),
      "[train] --val_size takes the rows to evaluate on from --data, and --eval_data names others. Give one of them.");
  QLORAPP_CHECK_VALUE(!args.packing || args.packing_strategy == "bfd" || args.eval_packing.value_or(true),
                      "[train] --val_size with --packing_strategy {} needs packed evaluation rows, as they are not cut one by one; "
                      "got --eval_packing "
                      "false. Leave that out, or use --eval_data.",
                      args.packing_strategy);
}

/// All that can be wrong without a look at data and weights.
Run parse_train(const Arguments& arguments) {
  Run run;
  TrainOptions& options = run.options;
  CommandLine line("train", "--model DIR --data FILE --output DIR",
                   "Fine-tunes low-rank adapters on a 4-bit base and writes a PEFT adapter folder.");
  add_train_options(line, options);
  line.parse(arguments);

  options.launch = launch_of_environment();
  options.args.output_dir = options.output;
  const bool has_eval_rows = !options.eval_data.empty() || options.args.val_size > 0;
  if (has_eval_rows && !line.given("eval_strategy")) options.args.eval_strategy = "epoch";
  options.defaults.settle(line, options.args, options.lora);
  options.args.validate();
  options.lora.validate();
  options.reports.validate();
  options.model.open();
  check_val_size(options);
  const bool evaluates = options.args.eval_strategy != "no" || options.args.eval_on_start;
  QLORAPP_CHECK_VALUE(!evaluates || has_eval_rows,
                      "[train] {} needs rows to evaluate on. Give --eval_data FILE or --val_size N, or leave the option out.",
                      options.args.eval_on_start ? "--eval_on_start" : message("--eval_strategy {}", options.args.eval_strategy));
  QLORAPP_CHECK_VALUE(
      options.args.eval_generate.value_or(0) == 0 || has_eval_rows,
      "[train] --eval_generate {} needs rows to evaluate on. Give --eval_data FILE or --val_size N, or leave the option out.",
      options.args.eval_generate.value_or(0));
  if (options.args.use_cpu) options.model.device = "cpu";
  QLORAPP_CHECK_VALUE(options.args.base_sharding == "no" || options.launch.size > 1,
                      "[ranks] --base_sharding {} divides the base over several processes; this is one. Start them with torchrun "
                      "--nproc-per-node N --no-python qlorapp train …, or leave the option out.",
                      options.args.base_sharding);
  if (options.launch.size > 1) options.model.device = device_of_rank(options.model.device, options.launch);

  run.config = options.model.config();
  check_adapter_folder("init_adapter", options.init_adapter);
  options.defaults.settle_targets(options.lora, run.config);
  if (!options.init_adapter.empty()) options.lora = config_of_adapter(line, options.lora, options.init_adapter, run.config);
  const at::Device device = parse_device(options.model.device);
  run.computed = choose_compute_dtype(requested_dtype(line, options.args, options.model.requested_dtype()), run.config.dtype,
                                      device.type(), gpu_architecture(device));
  set_precision(options.args, run.computed.dtype);
  run.storage = options.model.storage_text(line, run.config);
  return run;
}

/// The checkpoint to go on from, if any. "true" is the newest of the output folder's run.
std::optional<std::string> checkpoint_to_resume(const TrainOptions& options) {
  const auto& wanted = options.args.resume_from_checkpoint;
  if (!wanted || *wanted == "false") return std::nullopt;
  if (*wanted != "true") return wanted;
  const NewestCheckpoint newest = newest_checkpoint(options.output);
  const std::string skipped = newest.skipped.empty() ? std::string() : joined(newest.skipped);
  QLORAPP_CHECK_VALUE(
      newest.path.has_value(),
      "[resume_from_checkpoint] there is no checkpoint to resume from in {}{}. Leave the option out to begin anew, or "
      "name a checkpoint folder.",
      options.output, skipped.empty() ? std::string() : message("; skipped: {}", skipped));
  if (!skipped.empty()) log_warning(message("[resume] resuming from {}; skipped: {}.", *newest.path, skipped));
  return newest.path;
}

/// Another run's work is never written over by accident.
void check_output(const TrainOptions& options) {
  const auto& resumed = options.args.resume_from_checkpoint;
  if ((resumed && *resumed != "false") || options.args.overwrite_output_dir) return;
  const bool used = files::exists(files::path_in(options.output, "trainer_state.json")) ||
                    !list_checkpoints(options.output).empty() ||
                    files::exists(files::path_in(options.output, "adapter_model.safetensors"));
  QLORAPP_CHECK_VALUE(
      !used,
      "[output] {} holds another run. Name a new folder, go on with --resume_from_checkpoint, or give --overwrite_output_dir.",
      options.output);
}

DatasetOptions dataset_options(const TrainOptions& options, int64_t vocab_size, bool packed) {
  DatasetOptions rows;
  // The strategies that lose nothing cut rows themselves (data/packing.hpp).
  rows.max_length = packed && options.args.packing_strategy != "bfd" ? 0 : options.args.max_length;
  rows.completion_only_loss = options.args.completion_only_loss;
  const bool asks = options.defaults.is_given()("assistant_only_loss");
  rows.assistant_only_loss = asks && options.args.assistant_only_loss;
  rows.prefer_assistant_only = !asks && options.args.assistant_only_loss;
  rows.model_vocab_size = vocab_size;
  options.rows.apply_to(rows);
  return rows;
}

/// "1.7", "8030".
std::string millions(int64_t count) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), count < 100'000'000 ? "%.1f" : "%.0f", static_cast<double>(count) * 1e-6);
  return text.data();
}

Bytes peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {static_cast<int64_t>(usage.ru_maxrss) * 1024};
}

/// The peak, and what of it the plan counts.
std::string peak_text(Bytes before_loading, const Trainer& trainer, at::Device device) {
  const Bytes peak = peak_memory();
  const std::string parts = device.is_cpu() ? message("{} more to load and train, of which the plan counts at most {}",
                                                      to_string(peak - before_loading), to_string(trainer.planned_memory()))
                                            : message("{} after that; the plan counts the GPU's memory, at most {}",
                                                      to_string(peak - before_loading), to_string(trainer.planned_memory()));
  return message("{}: {} before the model was loaded (program, libraries, rows), {}", to_string(peak), to_string(before_loading),
                 parts);
}

/// Of the longest row of the data. Nothing is loaded.
PlanSettings settings_of_run(const TrainOptions& options, const format::ModelConfig& config, const Dataset& train_data,
                             const Dataset& eval_data) {
  const at::Device device = parse_device(options.model.device);
  PlanSettings settings =
      plan_settings(config, options.lora, options.args,
                    {.load_in_4bit = options.model.bnb.load_in_4bit,
                     .quantization = options.model.quantization(),
                     .keep_blocks = options.model.keeps_blocks(),
                     .skip_modules = options.model.bnb.llm_int8_skip_modules.value_or(std::vector<std::string>{}),
                     .device = planned_device(device),
                     .ranks = options.shards});
  settings.length = 2;
  const bool packs = options.args.packing, packs_eval = options.args.eval_packing.value_or(packs);
  for (const auto& [data, is_packed] : {std::pair{&train_data, packs}, {&eval_data, packs_eval}}) {
    if (is_packed && !data->examples.empty()) settings.length = std::max(settings.length, options.args.max_length);
    for (const Example& row : data->examples)
      if (!is_packed) settings.length = std::max(settings.length, static_cast<int64_t>(row.input_ids.size()));
  }
  if (eval_data.examples.empty()) settings.eval_batch = 0;
  return settings;
}

/// base_sharding. Under a budget that a whole base on each process does not fit, the base is sharded.
std::string chosen_sharding(const TrainOptions& options, const format::ModelConfig& config, const Dataset& train_data,
                            const Dataset& eval_data, Communicator& ranks) {
  if (options.args.memory_budget.empty() || options.args.base_sharding != "no" || ranks.size() == 1)
    return options.args.base_sharding;
  const at::Device device = parse_device(options.model.device);
  const Gpu rates = rates_of(gpu_name(device), gpu_architecture(device), {});
  const Bytes room = memory_for(device);  // once: what is free changes while one looks
  const auto fits = [&](const char* sharding) {
    TrainOptions asked = options;
    asked.args.base_sharding = sharding;
    try {
      static_cast<void>(fit_arguments(settings_of_run(asked, config, train_data, eval_data), asked.args, rates, room));
      return true;
    } catch (const ValueError&) { return false; }  // which loading the model tells in full
  };
  return text_of_first(ranks, ranks.is_first() && !fits("no") && fits("full") ? "full" : "no");
}

/// Strings that no template renders.
bool is_raw_text(RowFormat format) { return format == RowFormat::kText || format == RowFormat::kPromptCompletion; }
/// Rows of an epoch, as batches count them. @param data  before packing.
int64_t rows_of(const Dataset& data, const TrainingArguments& args) {
  if (!args.packing) return std::ssize(data.examples);
  int64_t tokens = 0;
  for (const Example& row : data.examples) tokens += std::ssize(row.input_ids);
  return tokens / args.max_length + 1;
}

/// gradient_checkpointing where it was left open and a step needs it. Free memory differs from GPU to GPU: the first rank's decides.
void turn_checkpointing_on(TrainOptions& options, const PlanSettings& settings, Communicator& ranks) {
  const bool needed = ranks.is_first() && options.defaults.turns_checkpointing_on(options.args, settings,
                                                                                  memory_for(parse_device(options.model.device)));
  if (text_of_first(ranks, needed ? "on" : "").empty()) return;
  options.args.gradient_checkpointing = true;
  log_info(message("gradient_checkpointing is on: {} x {} tokens do not fit without it", settings.batch, settings.length));
}

/// The plan for the longest row of the data. @returns whether it fits.
bool print_plan(const TrainOptions& options, const format::ModelConfig& config, const Dataset& train_data,
                const Dataset& eval_data) {
  const at::Device device = parse_device(options.model.device);
  const PlanSettings settings = settings_of_run(options, config, train_data, eval_data);
  const Bytes room = memory_for(device);  // once: what is free changes while one looks
  const FittedArguments fitted =
      options.defaults.fit(settings, options.args, rates_of(gpu_name(device), settings.device.architecture, {}), room);
  if (!fitted.text.empty()) print_text(stdout, fitted.text + "\n\n");
  const MemoryPlan plan = plan_memory_in(fitted.settings, room);
  print_text(stdout, message("{}\n{}\n{}\n{}\n", summary_line(plan, fitted.settings), phase_table(plan),
                             checklist(plan, fitted.settings), verdict(plan, room)));
  return plan.fits;
}

std::string described(at::Device device) {
  const int threads = at::get_num_threads();
  return device.is_cuda() ? gpu_name(device) : message("a CPU with {}{}", threads, threads == 1 ? " thread" : " threads");
}

/// Before anything is exchanged whose size depends on it. The trainer compares base and data.
void check_ranks(const Run& run, const TrainOptions& options, Communicator& ranks) {
  if (ranks.size() == 1) return;
  TrainingArguments compared = options.args;
  compared.output_dir.clear();  // may be another path to the same folder
  compared.use_cpu = false;     // compared as the device type
  check_same_on_all(ranks, "version of qlorapp", QLORAPP_VERSION);
  check_same_on_all(ranks, "options", format::to_json(compared).dump());
  check_same_on_all(ranks, "adapter options", format::to_json(options.lora).dump());
  check_same_on_all(ranks, "base model (shape and storage)",
                    message("{} layers of {} x {}, {} words, {}, {}", run.config.num_hidden_layers, run.config.hidden_size,
                            run.config.intermediate_size, run.config.vocab_size, run.storage, c10::toString(run.computed.dtype)));
}

void say_what_runs(const Run& run) {
  log_info(message("model: {}, {} M parameters, {}", model_path(run.options.model.model),
                   millions(format::parameter_count(run.config)), run.storage));
  log_info(message("computes in {}, on {}", run.computed.reason, described(parse_device(run.options.model.device))));
}

/// Calls `work`. An error that says that nothing was done says otherwise if this run has taken a step.
template <class Work>
auto until_stopped(const std::string& output, const bool& has_stepped, const Work& work) {
  const auto fail = [&](const Error& error, bool by_system) {
    bool goes_on = false;
    try {
      goes_on = by_system && newest_checkpoint(output).path.has_value();
    } catch (const Error&) {}  // the folder cannot be read either
    throw BegunRunFailed(goes_on ? message("{} Then go on with --resume_from_checkpoint true.", error.what()) : error.what(),
                         goes_on ? kCanGoOn : 1);
  };
  try {
    return work();
  } catch (const IoError& error) {
    if (has_stepped) fail(error, true);
    throw;
  } catch (const OutOfMemoryError&) { throw; } catch (const Error& error) {
    if (has_stepped) fail(error, false);
    throw;
  }
}

int train(const Run& run, const std::shared_ptr<Communicator>& ranks) {
  TrainOptions options = run.options;
  const format::ModelConfig& config = run.config;
  const bool writes = ranks->is_first() && !options.dry_run;
  if (ranks->is_first()) {
    files::check_output_folder(options.output);
    check_output(options);
  }
  // From here on no other run writes there, and an interrupted run is recovered.
  const auto folder = writes ? std::make_shared<RunFolder>(options.output) : nullptr;
  const std::string found = text_of_first(*ranks, ranks->is_first() ? checkpoint_to_resume(options).value_or("") : std::string());
  const std::optional<std::string> resume_from = found.empty() ? std::nullopt : std::optional(found);
  if (resume_from) options.defaults.follow_checkpoint(*resume_from, options.args, options.lora, ranks->size());
  check_ranks(run, options, *ranks);
  say_what_runs(run);

  FolderText tools = options.model.text_tools(options.init_adapter);
  TextFiles text = tools.files();  // before anything is trained: those that the rows are made with
  const auto read = [&](const std::string& path, bool packed, Split split) {
    return read_rows(path, dataset_options(options, config.vocab_size, packed), tools, split);
  };
  Dataset train_data = read(options.data, options.args.packing, Split::kTrain);
  Dataset eval_data;
  if (!options.eval_data.empty())
    eval_data = read(options.eval_data, options.args.eval_packing.value_or(options.args.packing), Split::kEval);
  if (options.args.val_size > 0) {
    const size_t rows = train_data.examples.size();
    const int64_t seed = options.args.data_seed.value_or(options.args.seed);
    eval_data.examples = split_off(train_data.examples, options.args.val_size, seed);
    log_info(message("val_size: {} of {} rows are evaluated and not trained (chosen by seed {})", eval_data.examples.size(), rows,
                     seed));
  }
  if (is_raw_text(train_data.summary.format) && tools.names_template()) {
    log_info("rows are trained as they are, without the chat template; generate applies it unless --raw is given");
  }
  options.defaults.set_rows(options.args, rows_of(train_data, options.args), ranks->size());
  if (tools.has_tokenizer()) log_info(message("first row, «trained»: {}", render_sample(train_data.examples.front(), tools)));

  const std::shared_ptr<Communicator> shard_ranks = options.args.base_sharding == "node" ? ranks_of_node(ranks) : ranks;
  options.shards = shard_ranks->size();
  if (const std::string sharding = chosen_sharding(options, config, train_data, eval_data, *ranks);
      sharding != options.args.base_sharding) {
    options.args.base_sharding = sharding;
    log_info(message("memory_budget: the base is divided over {} processes (base_sharding=full)", ranks->size()));
  }
  turn_checkpointing_on(options, settings_of_run(options, config, train_data, eval_data), *ranks);
  const std::string defaults = options.defaults.line(options.args, options.lora, options.init_adapter.empty());
  if (!defaults.empty()) log_info(defaults);
  if (options.dry_run) {
    if (!ranks->is_first()) return 0;
    return print_plan(options, config, train_data, eval_data) ? 0 : kDoesNotFit;
  }
  if (const std::string line = learning_rate_line(options.args.learning_rate, format::parameter_count(config)); !line.empty())
    log_info(line);
  const Bytes before_loading = peak_memory();
  // Under a budget the table goes to the host first: the smallest way to load. What is chosen then may bring it back.
  MemorySettings memory = options.args.memory();
  memory.embedding_on_host = memory.embedding_on_host || !options.args.memory_budget.empty();
  CausalLM model = options.model.load(run.computed.dtype, memory, options.args.base_sharding == "no" ? nullptr : shard_ranks);
  if (options.init_adapter.empty()) {
    model.add_adapters(options.lora, static_cast<uint64_t>(options.args.seed), kDefaultAdapter,
                       checkpoint_weights(options.model.model));
  } else {
    load_adapter(model, options.init_adapter);
  }
  const ParameterCount count{model.arena().numel(), model.decoder().parameter_count() + model.arena().numel()};
  log_info(message("{}; model in memory: {}", trainable_parameters_line(count), to_string(model.decoder().weight_bytes())));

  const StopSignals signals;
  RunReport report(options.args.logging_strategy);
  TrainerCallbacks callbacks = ranks->is_first() ? report.callbacks() : TrainerCallbacks();
  bool has_stepped = false;  // on this rank, too
  callbacks.on_event = [&has_stepped, told = std::move(callbacks.on_event)](TrainerEvent event, const TrainState& state,
                                                                            TrainerControl& control) {
    has_stepped = has_stepped || event == TrainerEvent::kStepEnd;
    if (told) told(event, state, control);
  };
  std::optional<Reports> reports;
  if (ranks->is_first() && !options.reports.report_to.empty()) {
    reports.emplace(options.reports, options.output, format::to_json(options.args).dump());
    callbacks.on_log = [&reports, told = std::move(callbacks.on_log)](const LogRecord& record, TrainerControl& control) {
      reports->log(record);
      if (told) told(record, control);
    };
  }
  AnswerReport answers(model, tools, eval_data.examples, writes, ranks->size() == 1);
  answers.add_to(callbacks, options.args, resume_from.has_value());
  callbacks.stop_now = [] { return StopSignals::received() != 0; };
  Trainer trainer(model, options.args, train_data.examples, eval_data.examples, options.model.model, std::move(callbacks), ranks);
  if (folder) trainer.use_folder(folder);
  trainer.use_text(std::move(text));
  report.watch(trainer);
  answers.watch(trainer);
  log_info(message("{} steps of {} x {} rows{}{}", trainer.max_steps(), trainer.args().per_device_train_batch_size,
                   trainer.args().gradient_accumulation_steps,
                   ranks->size() > 1 ? message(" on each of {} processes", ranks->size()) : std::string(),
                   resume_from ? " from " + *resume_from : std::string()));
  const TrainOutput output = until_stopped(options.output, has_stepped, [&] { return trainer.train(resume_from); });
  if (output.stopped) {
    const int received = StopSignals::received(), signal = received != 0 ? received : SIGTERM;  // another process had it
    if (ranks->is_first()) {
      report.line(message("stopped by {} after step {} of {}; {}", StopSignals::name(signal), output.global_step,
                          trainer.max_steps(),
                          output.global_step > 0 ? "go on with --resume_from_checkpoint true" : "nothing was trained yet"));
    }
    return 128 + signal;
  }
  if (ranks->is_first()) until_stopped(options.output, has_stepped, [&] { trainer.save_model(options.output); });
  const std::string peak = peak_text(before_loading, trainer, model.device());  // of the run, not of the comparison
  if (ranks->is_first()) {
    for (const std::string& line : answers.compare()) report.line(line);
  }
  log_info(message("adapter written to {}; peak host memory {}", options.output, peak));
  if (const std::string line = trainer.trend(); !line.empty() && ranks->is_first()) log_warning(line);
  return 0;
}

}  // namespace

int train(const Arguments& arguments) {
  const Run run = parse_train(arguments);
  const at::Device device = parse_device(run.options.model.device);
  const c10::DeviceGuard this_gpu(device);  // what has no device of its own is on this rank's
  const auto ranks = communicator_of(run.options.launch, device, std::chrono::seconds{run.options.args.ddp_timeout});
  speak_as(*ranks);
  return reporting_failures(ranks.get(), [&] { return train(run, ranks); });
}

}  // namespace qlorapp::cli
