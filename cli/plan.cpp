// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "command.hpp"
#include "command_defaults.hpp"
#include "command_line.hpp"
#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "format/config_json.hpp"
#include "hub.hpp"
#include "io/linear_weight.hpp"
#include "json/python_json.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/io/compute_dtype.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/gguf.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/generation_plan.hpp"
#include "qlorapp/memory/known_models.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "qlorapp/memory/timeline_svg.hpp"
#include "qlorapp/nn/generate.hpp"
#include "qlorapp/train/batch_probe.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "training_options.hpp"

namespace qlorapp::cli {
namespace {

/// Above this many rows a larger batch is nothing that anybody would want.
constexpr int64_t kMostRows = 4096;

struct PlanOptions {
  std::string model, gpu = "auto", dtype = "auto", context, compare_with, svg, write_config, data = "rows.jsonl", output = "output";
  int64_t gpu_architecture = 0, gpus = 1, batch = 0, seq = 0, dataset_rows = 0, avg_tokens = 0, effective_batch = 32;
  double gpu_bandwidth = 0, gpu_tflops = 0, hours = 0;
  bool explained = false, has_hours = false, measured = false, load_in_4bit = true, generates = false, do_sample = false;
  std::string adapter, cache_memory;
  int64_t prompt_tokens = 512;
  GenerationRows rows;
  std::string requantize;
  std::optional<at::ScalarType> requested;  ///< Of --dtype, --bf16 and --fp16.
  TrainingArguments args;
  LoraConfig lora;
  CommandDefaults defaults;
  std::set<std::string> names_given;  ///< On the line or in its config file.
};

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == at) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

constexpr std::array<const char*, 6> kOfGeneration{"adapter",  "prompt_tokens", "max_new_tokens",
                                                   "max_rows", "cache_memory",  "do_sample"};

/// A generation has no step, so what describes one is refused.
void check_generation_options(const CommandLine& line) {
  std::set<std::string> known{
      "generate",         "model",         "gpu",          "dtype",      "bf16",       "fp16",          "context",
      "gpu_architecture", "gpu_bandwidth", "load_in_4bit", "requantize", "gpu_tflops", "memory_budget", "defaults"};
  known.insert(kOfGeneration.begin(), kOfGeneration.end());
  for_each_field<LoraConfig>([&](const auto& field) { known.emplace(field.name); });
  for (const std::string& name : line.given())
    QLORAPP_CHECK_VALUE(known.contains(name), "[plan] --{} has no effect on a generation. Leave it or --generate out.", name);
}

/// Nothing that is given is without effect.
void check_combination(const CommandLine& line, const PlanOptions& options) {
  const int answers = (options.explained ? 1 : 0) + (options.generates ? 1 : 0) + (options.compare_with.empty() ? 0 : 1) +
                      (line.given("hours") ? 1 : 0);
  QLORAPP_CHECK_VALUE(answers <= 1, "[plan] --explain, --compare, --hours and --generate exclude each other. Give one of them.");
  const auto needs = [&](std::initializer_list<const char*> names, bool there, const char* what) {
    for (const char* name : names) QLORAPP_CHECK_VALUE(there || !line.given(name), "[plan] --{} needs {}.", name, what);
  };
  const bool shards = options.args.base_sharding != "no";
  for (const char* name : kOfGeneration) needs({name}, options.generates, "--generate");
  if (options.generates) check_generation_options(line);
  needs({"gpus"}, line.given("hours") || shards, "--hours or --base_sharding: otherwise a plan is of one process");
  QLORAPP_CHECK_VALUE(!shards || options.gpus > 1, "[plan] --base_sharding divides the base over several GPUs. Give --gpus.");
  needs({"measure"}, !shards, "one process: leave --base_sharding out");
  needs({"avg_tokens", "effective_batch", "write_config", "data", "output"}, line.given("hours"),
        "--hours: it belongs to a configuration for a deadline");
  needs({"svg", "measure"}, answers == 0, "the plan of one run: leave --explain, --compare and --hours out");
  const bool by_memory = !options.gpu.empty() && std::isdigit(static_cast<unsigned char>(options.gpu.front())) != 0;
  const std::vector<std::string> compared = split(options.compare_with, ',');
  const bool compares_by_memory = std::any_of(compared.begin(), compared.end(), [](const std::string& one) {
    return !one.empty() && std::isdigit(static_cast<unsigned char>(one.front())) != 0;
  });
  needs({"gpu_architecture", "gpu_bandwidth", "gpu_tflops"}, by_memory || compares_by_memory,
        "a GPU given by its memory, such as --gpu 20GiB; a named GPU has known rates");
  const bool is_card = options.gpu != "auto" && options.gpu != "cpu";
  needs({"context"}, is_card || !options.compare_with.empty(), "a GPU given by its name or its memory");
  needs({"gpu"}, options.compare_with.empty(), "a plan without --compare, which names its own GPUs");
  needs({"measure"}, !is_card, "a device of this machine: leave --gpu out, or give cpu");
  const auto decides = [&](std::initializer_list<const char*> names, bool asked, const char* what) {
    for (const char* name : names)
      QLORAPP_CHECK_VALUE(!asked || !line.given(name), "[plan] --{} cannot be combined with {}.", name, what);
  };
  decides({"batch", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "memory_budget",
           "auto_find_batch_size", "gradient_checkpointing", "checkpoint_keep", "dtype", "bf16", "fp16"},
          line.given("hours"),
          "--hours, which chooses batch, checkpoint_keep, precision and epochs (give --effective_batch and --num_train_epochs "
          "instead)");
  decides({"load_in_4bit", "requantize"}, line.given("hours"), "--hours, which plans a four-bit base");
  decides({"batch", "per_device_train_batch_size", "gradient_accumulation_steps"}, !options.compare_with.empty(),
          "--compare, which sets batch and accumulation itself, as in T4:2x16");
  decides({"memory_budget"}, options.explained,
          "--explain, which plans the run as given; without --explain, plan prints the settings that a budget chooses");
  decides({"auto_find_batch_size"}, options.explained || !options.compare_with.empty(),
          "--explain and --compare, which plan the batch as given; without them, plan prints the batch that fits");
  QLORAPP_CHECK_VALUE(!options.measured || files::is_regular_file(files::path_in(options.model, "config.json")),
                      "[plan] --measure loads the model, so --model must be its folder; got '{}'.", options.model);
}

PlanOptions parse_plan(const Arguments& arguments) {
  PlanOptions options;
  CommandLine line("plan", "--model DIR [--gpu NAME]",
                   "Prints the memory of a run, and its time with --explain, --compare or --hours, without loading the model.");
  line.option("model", options.model, "folder of a Hugging Face checkpoint, a config.json, or a known name such as llama-3-8b",
              true);
  line.option("gpu", options.gpu,
              "T4, A10, RTX 4090, H200 …, an amount of memory such as 16GiB, cpu, or auto (this machine's device)");
  line.option("gpu_architecture", options.gpu_architecture, "architecture of a GPU given by its memory: 75, 80, 86, 89, 90 …");
  line.option("gpu_bandwidth", options.gpu_bandwidth, "memory bandwidth in GB/s of a GPU given by its memory");
  line.option("gpu_tflops", options.gpu_tflops, "dense 16-bit TFLOP/s of a GPU given by its memory");
  line.option(
      "context", options.context,
      "memory of the CUDA context, in addition to torch's; default: 801MiB on an H200 (measured), 512MiB on other GPUs (assumed)");
  line.option("batch", options.batch, "rows per micro-batch; the same as --per_device_train_batch_size");
  line.option("dtype", options.dtype,
              "compute dtype: auto (the checkpoint's), float32, bfloat16 or float16; the same as --bf16 and --fp16");
  line.option("seq", options.seq, "tokens of the longest row; the same as --max_length");
  line.option("explain", options.explained, "explain step by step what uses memory, whether it fits, and what to change first");
  line.option("compare", options.compare_with,
              "compare speed, memory and quality of GPU:BATCHxACCUMULATION, such as T4:2x16,A10:8x4");
  line.option("gpus", options.gpus, "GPUs of one machine, each with a process of its own; for --hours and --base_sharding");
  line.option("hours", options.hours, "print a configuration whose run ends within this many hours");
  line.option("dataset_rows", options.dataset_rows, "rows of the training data: fewer than 16 per update for few rows");
  line.option("avg_tokens", options.avg_tokens, "average tokens per row, for --hours");
  line.option("effective_batch", options.effective_batch, "rows per update over all GPUs, for --hours");
  line.option("write_config", options.write_config,
              "with --hours: write the configuration to this file, for qlorapp train --config");
  line.option("data", options.data, "training rows named in the written configuration");
  line.option("output", options.output, "output folder named in the written configuration");
  line.option("generate", options.generates, "plan the answers of qlorapp generate in place of a training run");
  line.option("adapter", options.adapter,
              "with --generate: PEFT adapter folder; unset: the adapter of --r …, or none if none of these is given");
  line.option("prompt_tokens", options.prompt_tokens, "with --generate: tokens of each prompt, if the model has the positions");
  line.option("max_new_tokens", options.rows.max_new_tokens, "with --generate: maximum number of new tokens");
  line.option("max_rows", options.rows.max_rows, "with --generate: prompts that are computed at once, at most");
  line.option("cache_memory", options.cache_memory, "with --generate: of keys and values, at most, as 4GB");
  line.option("do_sample", options.do_sample, "with --generate: plan for drawn tokens, with top_p");
  line.option("measure", options.measured,
              "load the model, run one step and print both measured peaks; --svg draws them over the plan");
  line.option("svg", options.svg, "write the planned timeline to this file");
  line.option("load_in_4bit", options.load_in_4bit, "false: linear layers are not quantized");
  add_requantize_to(line, options.requantize);
  line.alias("output_dir", "output");
  options.defaults.add_to(line, options.args, options.lora);
  line.fields(options.args);
  line.fields(options.lora);
  line.unused(unused_training_arguments());
  line.unused(unused_lora_options());
  line.group("Model and card", {"model", "defaults", "load_in_4bit", "requantize", "dtype", "gpu", "gpu_architecture",
                                "gpu_bandwidth", "gpu_tflops", "context"});
  line.group("Output", {"explain", "compare", "generate", "measure", "svg"});
  line.group("A configuration for a deadline",
             {"hours", "gpus", "dataset_rows", "avg_tokens", "effective_batch", "write_config", "data", "output"});
  line.group("Rows", {"batch", "seq", "packing", "prompt_tokens", "max_new_tokens", "max_rows", "cache_memory"});
  group_training_fields(line);
  line.parse(arguments);
  if (is_hub_name(options.model)) {
    const std::string name = options.model;
    options.model = hub_folder(name, options.measured ? "model" : "config", "");
    set_model_path(options.model, name);
  }
  check_requantize(options.requantize, options.model);
  options.model = model_folder(options.model);
  options.has_hours = line.given("hours");
  options.names_given = line.given();
  if (line.given("seq")) options.names_given.emplace("max_length");
  options.requested =
      requested_dtype(line, options.args, options.dtype == "auto" ? std::nullopt : std::optional(parse_dtype(options.dtype)));
  check_combination(line, options);
  for (const auto& [name, value] :
       {std::pair{"batch", options.batch}, {"seq", options.seq}, {"prompt_tokens", options.prompt_tokens}}) {
    QLORAPP_CHECK_VALUE(value > 0 || !line.given(name), "[plan] --{} must be above 0; got {}.", name, value);
  }
  if (options.generates) {
    QLORAPP_CHECK_VALUE(options.rows.max_rows > 0 && options.rows.max_rows <= kMostRows,
                        "[plan] --max_rows must be from 1 to {}; got {}.", kMostRows, options.rows.max_rows);
    if (!options.cache_memory.empty()) options.rows.cache = parse_bytes("cache_memory", options.cache_memory);
    options.rows.sampling.do_sample = options.do_sample;
    if (options.do_sample) options.rows.sampling.top_p = kPlannedTopP;
    bool has_lora = false;
    for_each_field<LoraConfig>([&](const auto& field) { has_lora = has_lora || line.given(field.name); });
    QLORAPP_CHECK_VALUE(options.adapter.empty() || !has_lora,
                        "[plan] the adapter is that of --adapter or one by --r and the like; got both. Leave one out.");
    check_adapter_folder("adapter", options.adapter);
    options.rows.has_adapter = has_lora || !options.adapter.empty();
  }
  if (options.batch > 0) options.args.per_device_train_batch_size = options.batch;
  const bool chooses_batch = line.given("batch") || options.has_hours || !options.compare_with.empty();
  if (chooses_batch) options.defaults.count_as_given("per_device_train_batch_size");
  options.defaults.settle(line, options.args, options.lora);
  options.defaults.set_rows(options.args, options.dataset_rows, options.gpus);
  if (options.seq > 0) options.args.max_length = options.seq;
  options.args.validate();
  options.lora.validate();
  return options;
}

Gpu named_gpu(const std::string& text, const PlanOptions& options) {
  return find_gpu(text, options.gpu_architecture, options.gpu_bandwidth * 1e9, options.gpu_tflops * 1e12);
}

/// "T4:2x16".
Contender parse_contender(const std::string& text, const PlanOptions& options) {
  const auto halves = split(text, ':');
  const auto sizes = halves.size() == 2 ? split(halves[1], 'x') : std::vector<std::string>{};
  const auto number = [&](const std::string& digits) {
    const format::Json value = detail::value_of(digits, static_cast<const int64_t*>(nullptr));
    QLORAPP_CHECK_VALUE(value.is_number_integer() && value.get<int64_t>() > 0,
                        "[compare] must be GPU:BATCHxACCUMULATION, such as T4:2x16; got '{}'.", text);
    return value.get<int64_t>();
  };
  QLORAPP_CHECK_VALUE(sizes.size() == 2, "[compare] must be GPU:BATCHxACCUMULATION, such as T4:2x16; got '{}'.", text);
  return {named_gpu(halves[0], options), number(sizes[0]), number(sizes[1])};
}

/// They decide the result or the memory of a run even at their defaults, which may be others in a later version.
constexpr std::array<std::string_view, 22> kAlwaysWritten{"per_device_train_batch_size",
                                                          "gradient_accumulation_steps",
                                                          "gradient_checkpointing",
                                                          "num_train_epochs",
                                                          "max_length",
                                                          "learning_rate",
                                                          "lr_scheduler_type",
                                                          "warmup_ratio",
                                                          "optim",
                                                          "weight_decay",
                                                          "max_grad_norm",
                                                          "packing",
                                                          "seed",
                                                          "logging_steps",
                                                          "save_strategy",
                                                          "save_steps",
                                                          "eval_strategy",
                                                          "r",
                                                          "lora_alpha",
                                                          "lora_dropout",
                                                          "target_modules",
                                                          "use_rslora"};
/// Chosen for the card and the deadline, beside kChosenByPlan.
constexpr std::array<std::string_view, 5> kPlanned{"per_device_train_batch_size", "per_device_eval_batch_size", "bf16", "fp16",
                                                   "num_train_epochs"};

/// The values of a run in two parts: given or planned, and assumed.
template <class Config>
void put_values(const Config& config, const IsGiven& given, format::Json& decided, format::Json& assumed) {
  const format::Json values = format::to_json(config), defaults = format::to_json(Config{});
  const auto is_in = [](std::string_view name, const auto& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const auto& [key, value] : values.items()) {
    if (key == "output_dir" || key == "memory_budget") continue;
    if (value == defaults[key] && !given(key) && !is_in(key, kAlwaysWritten)) continue;
    if (key == "assistant_only_loss" && !given(key)) continue;  // train: where rows have turns
    (given(key) || is_in(key, kPlanned) || is_in(key, kChosenByPlan) ? decided : assumed)[key] = value;
  }
}

int plan_for_deadline(const PlanOptions& options, const format::ModelConfig& model, const Gpu& gpu,
                      const DeviceAllowance& allowance) {
  const Recommendation found =
      recommend(model, options.lora, options.args, gpu,
                {options.dataset_rows, options.avg_tokens, options.hours, options.gpus, options.effective_batch}, allowance);
  print_text(stdout, found.text);
  format::Json json = format::Json::object();
  json["model"] = model_path(options.model);
  json["data"] = options.data;
  json["output"] = options.output;
  format::Json assumed = format::Json::object();
  const IsGiven given = [&](std::string_view name) { return options.names_given.contains(std::string(name)); };
  put_values(found.args, given, json, assumed);
  put_values(found.lora, given, json, assumed);
  json["// assumed"] =
      "the values below were not given and are defaults; check them on held-out rows (--eval_data). Of messages the assistant's "
      "turns "
      "are trained, of prompts and completions the completions.";
  json.update(assumed);
  const std::string text = format::dump_python_json(json, {.indent = 2}) + "\n";  // in this order
  if (options.write_config.empty()) {
    print_text(stdout, text);
  } else {
    files::write_file_atomically(options.write_config, text);
    print_line(stdout, message("written to {}", options.write_config));
  }
  if (!files::exists(options.model))
    print_line(stdout, message("{} is a known model name, not a folder. To train, give the folder of your checkpoint as --model.",
                               options.model));
  return 0;
}

/// Architectures from 80 on compute in all of them.
constexpr int64_t kEveryDtype = 80;

std::string computed_text(const ComputeDtype& computed) { return "The run computes in " + computed.reason; }

/// Where the run is to be.
struct Place {
  ops::PlannedDevice device;
  Gpu rates;
  Bytes room;  ///< For torch.
  std::string card;
};

Place place_of(const PlanOptions& options, const DeviceAllowance& allowance) {
  if (options.gpu != "auto" && options.gpu != "cpu") {
    const Gpu gpu = named_gpu(options.gpu, options);
    return {gpu.device(), gpu, room_on(gpu, allowance), gpu.name.empty() ? options.gpu : std::string(gpu.name)};
  }
  const at::Device device = parse_device(options.gpu);
  const Bytes room = memory_for(device);
  const std::string name = gpu_name(device);
  return {planned_device(device), rates_of(name, gpu_architecture(device), room), room, name.empty() ? "a CPU" : name};
}

/// The plan of the answers to equal prompts, and how many rows fit.
int plan_answers(const PlanOptions& options, PlanSettings settings, const Place& place, const ComputeDtype& computed) {
  if (!options.adapter.empty()) settings.lora = lora_of_adapter(options.adapter);
  const bool given = options.names_given.contains("prompt_tokens");
  const int64_t prompt = planned_prompt_tokens(settings.model, given ? std::optional(options.prompt_tokens) : std::nullopt,
                                               options.rows.max_new_tokens);
  GenerationRows rows = options.rows;
  rows.prompts.assign(static_cast<size_t>(rows.max_rows), prompt);
  const std::string& budget = options.args.memory_budget;
  const bool bounded = !budget.empty() && budget != "auto";
  const Bytes room = bounded ? std::min(parse_bytes("memory_budget", budget), place.room) : generation_room(place.room);
  const GenerationPlan found = plan_generation(settings, rows, room);
  const int64_t most = largest_rows(settings, rows, room, kMostRows);
  std::printf("%s\n%s.\n%s%s", summary_line(found, settings).c_str(), computed_text(computed).c_str(),
              phase_table(found.memory).c_str(), cache_text(found, settings).c_str());
  std::printf("%s; the most rows of %lld + %lld tokens that fit together are %lld%s\n", verdict(found.memory, room).c_str(),
              static_cast<long long>(prompt), static_cast<long long>(rows.max_new_tokens), static_cast<long long>(most),
              most == kMostRows ? " or more" : "");
  return found.memory.fits ? 0 : kDoesNotFit;
}

/// Loads the model and takes one step, and says what both really took.
Probe measure(const PlanOptions& options, const PlanSettings& settings, const MemoryPlan& plan) {
  LoadOptions load;
  load.device = parse_device(options.gpu);
  load.compute_dtype = settings.compute_dtype;
  load.load_in_4bit = settings.load_in_4bit;
  load.keep_blocks = settings.keep_blocks;
  load.quantization = settings.quantization;
  load.embedding_on_host = settings.memory.embedding_on_host;
  load.base_on_host = settings.memory.base_on_host;
  std::optional<MeasuredMemory> loading(MeasuredMemory::Options{load.device.type(), {}, false});
  CausalLM model = load_model(options.model, load);
  const Bytes loaded{loading->peak()};
  loading.reset();
  model.add_adapters(settings.lora, 0, kDefaultAdapter, checkpoint_weights(options.model));
  Probe probe = probe_planned(model, settings, /*records=*/true);
  const auto line = [](const char* what, Bytes measured, Bytes planned) {
    std::printf("%s: measured %s, planned %s, %+.2f %%\n", what, to_string(measured).c_str(), to_string(planned).c_str(),
                100 * (static_cast<double>(planned.count) / static_cast<double>(measured.count) - 1));
  };
  line("load", loaded, plan.of(ops::MemoryPhase::kLoad).allocated);
  line("training and evaluation", probe.peak, plan.training_peak());
  return probe;
}

}  // namespace

int plan(const Arguments& arguments) {
  PlanOptions options = parse_plan(arguments);
  check_model_folder(options.model);
  const format::ModelConfig model = find_model_config(options.model);
  options.defaults.settle_targets(options.lora, model);
  DeviceAllowance allowance;
  if (!options.context.empty()) allowance.context = parse_bytes("context", options.context);
  TrainingArguments args = options.args;
  const bool keeps_blocks = options.load_in_4bit && options.requantize.empty();

  if (!options.compare_with.empty()) {
    std::vector<Contender> contenders;
    for (const std::string& one : split(options.compare_with, ',')) contenders.push_back(parse_contender(one, options));
    // Of a card with every dtype: compare() replaces bfloat16 where one has none.
    set_precision(args, choose_compute_dtype(options.requested, model.dtype, at::kCUDA, kEveryDtype).dtype);
    const PlanSettings settings =
        plan_settings(model, options.lora, args, {.load_in_4bit = options.load_in_4bit, .keep_blocks = keeps_blocks});
    const std::string& budget = args.memory_budget;
    const bool bounded = !budget.empty() && budget != "auto";
    std::printf(
        "%s", compare(settings, contenders, allowance, bounded ? std::optional(parse_bytes("memory_budget", budget)) : std::nullopt)
                  .c_str());
    return 0;
  }

  const Place place = place_of(options, allowance);
  const ComputeDtype computed = choose_compute_dtype(options.requested, model.dtype, place.device.type, place.device.architecture);
  set_precision(args, computed.dtype);
  PlanSettings settings = plan_settings(
      model, options.lora, args,
      {.load_in_4bit = options.load_in_4bit, .keep_blocks = keeps_blocks, .device = place.device, .ranks = options.gpus});

  if (options.generates) return plan_answers(options, std::move(settings), place, computed);
  if (options.has_hours || options.explained) {
    QLORAPP_CHECK_VALUE(
        place.device.type == at::kCUDA,
        "[plan] --hours and --explain need a GPU; this machine has none. Give --gpu: the name of a card, or its memory.");
    if (options.has_hours) return plan_for_deadline(options, model, place.rates, allowance);
  }
  if (options.defaults.turns_checkpointing_on(args, settings, place.room)) {
    args.gradient_checkpointing = true;
    settings.segments = parse_segments(args.keep_text(), model.num_hidden_layers);
    std::printf("gradient_checkpointing is on: %lld x %lld tokens do not fit without it\n\n",
                static_cast<long long>(settings.batch), static_cast<long long>(settings.length));
  }
  const FittedArguments fitted = options.defaults.fit(settings, args, place.rates, place.room);
  settings = fitted.settings;
  if (!fitted.text.empty()) std::printf("%s\n\n", fitted.text.c_str());
  if (options.explained) {
    std::printf("%s.\n", computed_text(computed).c_str());
    std::printf("%s", explain(settings, place.rates, allowance).c_str());
    return 0;
  }
  const MemoryPlan found = plan_memory_in(settings, place.room);
  std::printf("%s\n%s.\n%s\n%s\n", summary_line(found, settings).c_str(), computed_text(computed).c_str(),
              phase_table(found).c_str(), checklist(found, settings).c_str());
  if (found.pinned_host.count > 0) std::printf("pinned host memory: %s\n", to_string(found.pinned_host).c_str());
  std::printf("%s", bus_text(settings, place.rates).c_str());
  const int64_t largest = largest_batch(settings, place.room, kMostRows);
  std::printf("%s; the largest batch that fits is %lld\n", verdict(found, place.room).c_str(), static_cast<long long>(largest));
  Probe probe;
  if (options.measured) probe = measure(options, settings, found);
  if (!options.svg.empty()) {
    files::write_file_atomically(
        options.svg, timeline_svg(found, timeline_title(model_path(options.model), settings, place.card),
                                  place.device.type == at::kCUDA ? std::optional(place.room) : std::nullopt, probe.moments));
    print_line(stdout, message("timeline written to {}", options.svg));
  }
  return found.fits ? 0 : kDoesNotFit;
}

}  // namespace qlorapp::cli
