// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>

#include <cstdio>
#include <string>

#include <nlohmann/json.hpp>

#include "command.hpp"
#include "command_line.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/format/atomic_file.hpp"
#include "qlorapp/format/config_json.hpp"
#include "qlorapp/format/python_json.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/known_models.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "qlorapp/memory/timeline_svg.hpp"
#include "qlorapp/train/plan_run.hpp"

namespace qlorapp::cli {
namespace {

struct PlanOptions {
  std::string model, gpu = "auto", context, compare_with, svg, write_config, data = "rows.jsonl", output = "output";
  int64_t gpu_architecture = 0, gpus = 1, batch = 0, seq = 0, dataset_rows = 0, avg_tokens = 0, effective_batch = 32;
  double gpu_bandwidth = 0, gpu_tflops = 0, hours = 0;
  bool explained = false, load_in_4bit = true;
  TrainingArguments args;
  LoraConfig lora;
};

PlanOptions parse(const Arguments& arguments) {
  PlanOptions options;
  options.lora.target_modules = NamesOrPattern("all-linear");
  CommandLine line("plan", "Says how much memory and time a run takes, before anything is loaded.");
  line.option("model", options.model, "folder of a Hugging Face checkpoint, a config.json, or a known name such as llama-3-8b",
              true);
  line.option("gpu", options.gpu,
              "T4, A10, RTX 4090, H200 …, an amount of memory such as 16GiB, cpu, or auto: the one that is here");
  line.option("gpu_architecture", options.gpu_architecture, "of a GPU given by its memory: 75, 80, 86, 89, 90 …");
  line.option("gpu_bandwidth", options.gpu_bandwidth, "GB/s of a GPU given by its memory");
  line.option("gpu_tflops", options.gpu_tflops, "dense 16-bit TFLOP/s of a GPU given by its memory");
  line.option("context", options.context, "memory that the CUDA context takes beside torch's; default an allowance of 512MiB");
  line.option("batch", options.batch, "rows of a micro-batch; the same as --per_device_train_batch_size");
  line.option("seq", options.seq, "tokens of the longest row; the same as --max_length");
  line.option("explain", options.explained, "step by step: what takes what, whether it fits, what to change first");
  line.option("compare", options.compare_with, "ways to one effective batch, as T4:2x16,A10:8x4: speed, memory, quality");
  line.option("gpus", options.gpus, "cards that share the work");
  line.option("hours", options.hours, "a configuration that ends in this time");
  line.option("dataset_rows", options.dataset_rows, "rows of the training data, for --hours");
  line.option("avg_tokens", options.avg_tokens, "tokens of a row on average, for --hours");
  line.option("effective_batch", options.effective_batch, "rows of an update over all cards, for --hours");
  line.option("write_config", options.write_config, "with --hours: a file that qlorapp train --config takes");
  line.option("data", options.data, "the training rows that the written configuration names");
  line.option("output", options.output, "the folder that the written configuration names");
  line.option("svg", options.svg, "a file for the planned timeline");
  line.option("load_in_4bit", options.load_in_4bit, "false: linear layers stay dense");
  line.fields(options.args);
  line.fields(options.lora);
  line.parse(arguments);
  QLORAPP_CHECK_VALUE(options.batch >= 0 && options.seq >= 0, "[plan] --batch and --seq must be above 0; got ", options.batch,
                      " and ", options.seq, ".");
  if (options.batch > 0) options.args.per_device_train_batch_size = options.batch;
  if (options.seq > 0) options.args.max_length = options.seq;
  options.args.validate();
  options.lora.validate();
  return options;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == at) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

/// "T4:2x16".
Contender parse_contender(const std::string& text) {
  const auto halves = split(text, ':');
  const auto sizes = halves.size() == 2 ? split(halves[1], 'x') : std::vector<std::string>{};
  const auto number = [&](const std::string& digits) {
    const format::Json value = detail::value_of(digits, static_cast<const int64_t*>(nullptr));
    QLORAPP_CHECK_VALUE(value.is_number_integer() && value.get<int64_t>() > 0,
                        "[compare] must be GPU:BATCHxACCUMULATION, such as T4:2x16; got '", text, "'.");
    return value.get<int64_t>();
  };
  QLORAPP_CHECK_VALUE(sizes.size() == 2, "[compare] must be GPU:BATCHxACCUMULATION, such as T4:2x16; got '", text, "'.");
  return {find_gpu(halves[0]), number(sizes[0]), number(sizes[1])};
}

/// What differs from the defaults, so that the file says what was decided.
template <class Config>
void put_changes(const Config& config, format::Json& into) {
  const format::Json values = format::to_json(config), defaults = format::to_json(Config{});
  for (const auto& [key, value] : values.items()) {
    if (value != defaults[key] && key != "output_dir") into[key] = value;
  }
}

int plan_for_deadline(const PlanOptions& options, const format::ModelConfig& model, const Gpu& gpu,
                      const DeviceAllowance& allowance) {
  const Recommendation found =
      recommend(model, options.lora, options.args, gpu,
                {options.dataset_rows, options.avg_tokens, options.hours, options.gpus, options.effective_batch}, allowance);
  std::printf("%s", found.text.c_str());
  format::Json json = format::Json::object();
  json["model"] = options.model;
  json["data"] = options.data;
  json["output"] = options.output;
  put_changes(found.args, json);
  put_changes(found.lora, json);
  const std::string text = format::dump_python_json(json, format::kConfigStyle) + "\n";
  if (options.write_config.empty()) {
    std::printf("%s", text.c_str());
  } else {
    format::write_file_atomically(options.write_config, text);
    std::printf("written to %s\n", options.write_config.c_str());
  }
  return 0;
}

}  // namespace

int plan(const Arguments& arguments) {
  const PlanOptions options = parse(arguments);
  const format::ModelConfig model = find_model_config(options.model);
  DeviceAllowance allowance;
  if (!options.context.empty()) allowance.context = parse_bytes("context", options.context);
  TrainingArguments args = options.args;

  if (!options.compare_with.empty()) {
    std::vector<Contender> contenders;
    for (const std::string& one : split(options.compare_with, ',')) contenders.push_back(parse_contender(one));
    if (!args.bf16 && !args.fp16) args.bf16 = true;
    std::printf("%s", compare(plan_settings(model, options.lora, args), contenders, allowance).c_str());
    return 0;
  }

  PlanSettings settings = plan_settings(model, options.lora, args);
  settings.load_in_4bit = options.load_in_4bit;
  std::optional<Gpu> gpu;
  const bool here = options.gpu == "auto" && has_gpu();
  if (here) {
    settings.device = {at::kCUDA, gpu_architecture(parse_device("auto")), 1};
  } else if (options.gpu != "auto" && options.gpu != "cpu") {
    gpu = find_gpu(options.gpu, options.gpu_architecture, options.gpu_bandwidth * 1e9, options.gpu_tflops * 1e12);
    settings.device = {at::kCUDA, gpu->architecture, 1};
  } else {
    settings.device = {at::kCPU, 0, at::get_num_threads()};
  }
  if (settings.device.type == at::kCUDA)
    settings.compute_dtype = usable_dtype(settings.compute_dtype, settings.device.architecture);

  if (options.hours != 0 || options.explained) {
    QLORAPP_CHECK_VALUE(gpu.has_value(), "[plan] --hours and --explain need --gpu: the name of a card, or its memory.");
    if (options.hours != 0) return plan_for_deadline(options, model, *gpu, allowance);
    std::printf("%s", explain(settings, *gpu, allowance).c_str());
    return 0;
  }
  if (!args.memory_budget.empty()) {
    const at::Device device = here ? parse_device("auto") : at::Device(at::kCPU);
    const FittedArguments fitted =
        fit_arguments(settings, args, gpu ? *gpu : rates_of(gpu_name(device), gpu_architecture(device), {}),
                      gpu ? room_on(*gpu, allowance) : memory_for(device));
    settings = fitted.settings;
    std::printf("%s\n\n", fitted.text.c_str());
  }
  const MemoryPlan found = plan_memory(settings);
  std::printf("%s\n%s\n%s\n", summary_line(found, settings).c_str(), phase_table(found).c_str(),
              checklist(found, settings).c_str());
  if (found.pinned_host.count > 0) std::printf("pinned host memory: %s\n", to_string(found.pinned_host).c_str());
  if (gpu) {
    const Bytes room = room_on(*gpu, allowance);
    settings.batch = std::max<int64_t>(1, settings.batch);
    std::printf("%s of %s: %s; the largest batch that fits is %lld\n", to_string(found.peak_reserved()).c_str(),
                to_string(room).c_str(), found.peak_reserved() <= room ? "fits" : "does not fit",
                static_cast<long long>(largest_batch(settings, room, 4096)));
  }
  if (!options.svg.empty()) {
    format::write_file_atomically(
        options.svg, timeline_svg(found, concat(options.model, ", ", settings.batch, " x ", settings.length, " tokens"),
                                  gpu ? std::optional(room_on(*gpu, allowance)) : std::nullopt));
    std::printf("timeline written to %s\n", options.svg.c_str());
  }
  return 0;
}

}  // namespace qlorapp::cli
