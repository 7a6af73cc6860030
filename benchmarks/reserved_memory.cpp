// SPDX-License-Identifier: Apache-2.0
// Trains a checkpoint below a cap, as Trainer does it, and prints a line of JSON: the peaks of what torch's allocator hands out and
// holds, how often it ran out of room and what the trainer did about it, and the speed. benchmarks/reserved_memory_cuda.py runs it.
//
//   bench_reserved_memory FOLDER NAME=VALUE…
//     cap=GiB          that the allocator may hold, from before the load on; 0: none
//     steps=N          optimizer steps; sequence=N: tokens of each row; batch=N: rows of a step
//     keep=POLICY      with gradient_checkpointing, as TrainingArguments has it; keep=everything: without it
//     budget=AMOUNT    memory_budget, which chooses micro-batch and policy
//     find=1           the batch is what the plan says is the largest, as find_max_batch_size asks it
//     optim=NAME
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "core/check.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/trainer.hpp"
#include "train_step_setting.hpp"

namespace {

using namespace qlorapp;
using Clock = std::chrono::steady_clock;

double gib(int64_t bytes) { return static_cast<double>(bytes) / (int64_t{1} << 30); }

void set_cap(double cap) {
  if (cap <= 0) return;
  const auto device = c10::cuda::current_device();
  const double total = gib(static_cast<int64_t>(at::cuda::getDeviceProperties(device)->totalGlobalMem));
  c10::cuda::CUDACachingAllocator::setMemoryFraction(cap / total, device);
}

std::vector<Example> random_rows(int64_t rows, int64_t length, int64_t vocabulary) {
  std::vector<Example> result;
  for (int64_t row = 0; row < rows; ++row) {
    const at::Tensor ids = at::randint(vocabulary, {length}, at::kInt);
    const std::vector<TokenId> tokens(ids.const_data_ptr<int>(), ids.const_data_ptr<int>() + length);
    result.push_back({.input_ids = tokens, .labels = tokens});
  }
  return result;
}

int run(const std::string& folder, std::map<std::string, std::string> words) {
  const auto number = [&](const char* name, double standard) { return words.contains(name) ? std::stod(words[name]) : standard; };
  const auto whole = [&](const char* name, int64_t standard) { return words.contains(name) ? std::stoll(words[name]) : standard; };
  int64_t parts = 0;  // warnings of a step that did not fit
  std::string chosen;
  set_log_sink([&](LogLevel level, std::string_view line) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
    if (level == LogLevel::kWarning && line.find("out of memory") != std::string_view::npos) ++parts;
    if (line.starts_with("memory_budget")) chosen = line.substr(0, std::min(line.find('\n'), line.find(';')));
  });
  at::manual_seed(0);
  at::globalContext().lazyInitDevice(at::kCUDA);
  set_cap(number("cap", 0));
  LoadOptions options;
  options.device = parse_device("cuda");
  options.compute_dtype = at::kBFloat16;
  CausalLM model = load_model(folder, options);
  model.add_adapters(bench::lora_config(), /*seed=*/0);

  TrainingArguments args;
  args.bf16 = true;
  args.optim = words.contains("optim") ? words["optim"] : "adamw_8bit";
  args.max_steps = whole("steps", 20);
  args.max_length = whole("sequence", 2048);
  args.per_device_train_batch_size = whole("batch", 4);
  args.gradient_accumulation_steps = 1;
  args.save_strategy = "no";
  args.logging_steps = static_cast<double>(args.max_steps);
  args.memory_budget = words["budget"];
  if (words.contains("keep") && words["keep"] != "everything") {
    args.gradient_checkpointing = true;
    args.checkpoint_keep = {words["keep"]};
    model.settings().set_segments(parse_segments(args.keep_text(), model.config().num_hidden_layers));
  }
  if (words.contains("find")) {
    PlanSettings settings = settings_of(model);
    settings.device = planned_device(model.device());
    settings.length = args.max_length;
    settings.optimizer_is_8bit = args.optimizer_is_8bit();
    args.per_device_train_batch_size = largest_batch(settings, memory_for(model.device()), 4096);
    chosen = message("batch {}", args.per_device_train_batch_size);
  }
  const int64_t rows = args.per_device_train_batch_size;
  args.validate();

  std::vector<Clock::time_point> ends;
  TrainerCallbacks callbacks;
  callbacks.on_event = [&](TrainerEvent event, const TrainState&, TrainerControl&) {
    if (event != TrainerEvent::kStepEnd) return;
    c10::cuda::device_synchronize();
    ends.push_back(Clock::now());
  };
  std::string error;
  try {
    Trainer trainer(model, args, random_rows(rows, args.max_length, model.config().vocab_size), {}, folder, callbacks);
    static_cast<void>(trainer.train());
  } catch (const c10::Error& failed) {
    error = failed.what_without_backtrace();
    error = error.substr(0, error.find_first_of("\n\""));
  }
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  const size_t warm = std::min<size_t>(3, ends.size() / 2);
  double rate = 0;
  if (ends.size() > warm + 1) {
    const double seconds = std::chrono::duration<double>(ends.back() - ends[warm]).count();
    rate = static_cast<double>(static_cast<int64_t>(ends.size() - warm - 1) * rows * args.max_length) / seconds;
  }
  std::printf(
      "{\"expandable\": %s, \"chosen\": \"%s\", \"steps\": %zu, \"parts\": %ld, \"retries\": %ld, \"allocated_gib\": %.3f, "
      "\"reserved_gib\": %.3f, \"tokens_per_second\": %.0f, \"error\": \"%s\"}\n",
      ops::uses_expandable_segments() ? "true" : "false", chosen.c_str(), ends.size(), static_cast<long>(parts),
      static_cast<long>(stats.num_alloc_retries), gib(stats.allocated_bytes[0].peak), gib(stats.reserved_bytes[0].peak), rate,
      error.c_str());
  return 0;
}

}  // namespace

int main(int count, char** values) {
  if (count < 2) {
    std::fprintf(stderr, "usage: bench_reserved_memory FOLDER NAME=VALUE…\n");
    return 2;
  }
  try {
    std::map<std::string, std::string> words;
    for (int i = 2; i < count; ++i) {
      const std::string word = values[i];
      words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    }
    return run(values[1], std::move(words));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_reserved_memory: %s\n", error.what());
    return 2;
  }
}
