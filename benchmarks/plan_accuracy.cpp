// SPDX-License-Identifier: Apache-2.0
// The planned peak of a training step beside torch's max_memory_allocated, over a grid of real shapes on a GPU. The models are
// made in four bits directly, of random codes: memory does not depend on values. Prints a line of JSON a point;
// benchmarks/plan_accuracy_cuda.py makes the table.
//
//   bench_plan_accuracy [--models 1b,3b,8b,70b] [--seconds 270] [--points SUBSTRING]
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/step.hpp"
#include "random_weights.hpp"
#include "train_step_setting.hpp"

namespace {

using namespace qlorapp;
namespace allocator = c10::cuda::CUDACachingAllocator;

struct Point {
  int64_t batch, length;
  std::string keep;  // a policy, a mixture "everything:8,input_only", "every:4" or "sqrt"
  int64_t rank = 8;
  std::string optim = "adamw_8bit";
  at::ScalarType dtype = at::kBFloat16;
};

std::vector<Point> grid(const std::string& model) {
  const std::string half = model == "1b"   ? "everything:8,input_only"
                           : model == "3b" ? "everything:14,input_only"
                                           : "everything:16,input_only";
  if (model == "70b") {
    return {{1, 512, "input_only"},
            {1, 2048, "input_only"},
            {1, 2048, "input_on_host"},
            {1, 4096, "input_on_host"},
            {1, 2048, "everything:20,input_only"},
            {2, 2048, "attention_only"},
            {1, 8192, "input_only", 8, "adamw"}};
  }
  std::vector<Point> points;
  for (const char* keep : {"everything", "attention_only", "input_only", "input_on_host"}) {
    points.push_back({1, 2048, keep});
    points.push_back({2, 2048, keep, 64, "adamw"});
  }
  for (const int64_t length : {512, 1024, 4096, 8192, 16384})
    points.push_back({1, length, "input_only", 8, length == 4096 ? "paged_adamw_8bit" : "adamw_8bit"});
  points.push_back({8, 512, "everything"});
  points.push_back({4, 1024, "attention_only", 64, "paged_adamw_32bit"});
  points.push_back({8, 2048, "input_only"});
  points.push_back({4, 2048, half});
  points.push_back({1, 4096, half, 64});
  points.push_back({2, 4096, "every:4"});
  points.push_back({1, 8192, "sqrt"});
  points.push_back({1, 16384, "input_on_host"});
  points.push_back({2, 2048, "everything", 8, "adamw_8bit", at::kHalf});
  points.push_back({2, 2048, "input_only", 64, "adamw", at::kHalf});
  return points;
}

c10::CachingDeviceAllocator::DeviceStats stats() { return allocator::getDeviceStats(c10::cuda::current_device()); }

/// What the card has less, beside torch's memory: context, driver, libraries.
int64_t outside_torch() {
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(total - free) - stats().reserved_bytes[0].current;
}

void measure(const std::string& model_name, const format::ModelConfig& config, const DecoderWeights& weights, const Point& point) {
  CausalLM model(config, weights);
  LoraConfig lora;
  lora.r = point.rank;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
  model.add_adapters(lora, 0);
  model.settings().set_segments(parse_segments(point.keep, config.num_hidden_layers));
  PlanSettings settings = settings_of(model);
  settings.batch = settings.eval_batch = point.batch;
  settings.length = point.length;
  settings.optimizer_is_8bit = point.optim.ends_with("_8bit");
  const cudaDeviceProp* const gpu = at::cuda::getCurrentDeviceProperties();
  settings.device = planned_device({at::kCUDA, c10::cuda::current_device()});
  const auto begin = std::chrono::steady_clock::now();
  const MemoryPlan plan = plan_memory(settings);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Bytes planned;
  for (const auto phase :
       {ops::MemoryPhase::kForward, ops::MemoryPhase::kLoss, ops::MemoryPhase::kBackward, ops::MemoryPhase::kOptimizer}) {
    planned = std::max(planned, plan.of(phase).allocated);
  }
  const std::string name = message("{} {}x{} {} r{} {} {}", model_name, point.batch, point.length, point.keep, point.rank,
                                   point.optim, point.dtype == at::kHalf ? "fp16" : "bf16");
  const size_t total = gpu->totalGlobalMem;
  if (static_cast<double>(plan.peak_reserved().count) > 0.95 * static_cast<double>(total)) {
    std::printf("{\"point\": \"%s\", \"skipped\": \"planned %.1f GiB\"}\n", name.c_str(),
                static_cast<double>(plan.peak_reserved().count) / 0x1p30);
    return;
  }
  AdamW::Options optimizer;
  if (settings.optimizer_is_8bit) optimizer.state = AdamW::State::kEightBit;
  optimizer.paged = point.optim.starts_with("paged_");
  GradScaler::Options scaler;
  scaler.device = at::kCUDA;
  scaler.enabled = point.dtype == at::kHalf;
  TrainState state(model.arena(), optimizer, scaler);
  state.base_learning_rate = 1e-6;
  state.max_grad_norm = 1.0;
  state.schedule.training_steps = 1 << 20;
  allocator::emptyCache();
  int64_t step_peak = 0, step_reserved = 0, evaluation_peak = 0;
  {
    const Batch batch = bench::random_batch(point.batch, point.length, config.vocab_size);
    allocator::resetPeakStats(c10::cuda::current_device());
    for (int i = 0; i < (point.batch * point.length <= 4096 ? 2 : 1); ++i)
      static_cast<void>(train_step(model, state, std::span(&batch, 1)));
    c10::cuda::device_synchronize();
    step_peak = stats().allocated_bytes[0].peak;
    step_reserved = stats().reserved_bytes[0].peak;
  }
  {
    const Batch batch = bench::random_batch(point.batch, point.length, config.vocab_size);
    allocator::resetPeakStats(c10::cuda::current_device());
    const at::NoGradGuard no_grad;
    static_cast<void>(model.loss_of(model.hidden_states(batch, false, 0, 0), batch));
    c10::cuda::device_synchronize();
    evaluation_peak = stats().allocated_bytes[0].peak;
  }
  std::printf(
      "{\"point\": \"%s\", \"planned\": %lld, \"measured\": %lld, \"planned_reserved\": %lld, \"measured_reserved\": %lld, "
      "\"planned_evaluation\": %lld, \"measured_evaluation\": %lld, \"phase\": \"%s\", \"plan_seconds\": %.3f, \"outside\": "
      "%lld, \"parts\": {",
      name.c_str(), static_cast<long long>(planned.count), static_cast<long long>(step_peak),
      static_cast<long long>(plan.peak_reserved().count), static_cast<long long>(step_reserved),
      static_cast<long long>(plan.of(ops::MemoryPhase::kEvaluation).allocated.count), static_cast<long long>(evaluation_peak),
      std::string(ops::to_string(plan.fullest_of_training())).c_str(), seconds, static_cast<long long>(outside_torch()));
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    std::printf("%s\"%s\": %lld", i ? ", " : "", std::string(ops::to_string(static_cast<ops::MemoryUse>(i))).c_str(),
                static_cast<long long>(parts[i].count));
  }
  std::printf("}}\n");
  std::fflush(stdout);
}

int run(const std::vector<std::string>& arguments) {
  std::string models = "1b,3b,8b,70b", wanted;
  double limit = 270;
  for (size_t i = 0; i + 1 < arguments.size(); i += 2) {
    if (arguments[i] == "--models") models = arguments[i + 1];
    else if (arguments[i] == "--seconds") limit = std::stod(arguments[i + 1]);
    else if (arguments[i] == "--points") wanted = arguments[i + 1];
    else throw ValueError(message("there is no option {}", arguments[i]));
  }
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "bench_plan_accuracy: no GPU here; nothing measured\n");
    return 0;
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto late = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > limit; };
  at::globalContext().lazyInitDevice(at::kCUDA);  // the allocator knows its devices from here on
  ops::prepare_device_memory();
  c10::cuda::device_synchronize();
  std::printf("{\"device\": \"%s\", \"context\": %lld}\n", at::cuda::getCurrentDeviceProperties()->name,
              static_cast<long long>(outside_torch()));
  for (const char* model : {"1b", "3b", "8b", "70b"}) {
    if (models.find(model) == std::string::npos) continue;
    const format::ModelConfig config = bench::config_of(model);
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      DecoderWeights weights;
      for (const Point& point : grid(model)) {
        if (point.dtype != dtype || point.keep.find(wanted) == std::string::npos) continue;
        if (late()) {
          std::printf("{\"point\": \"%s %lldx%lld %s\", \"skipped\": \"out of time\"}\n", model,
                      static_cast<long long>(point.batch), static_cast<long long>(point.length), point.keep.c_str());
          continue;
        }
        if (!weights.norm.defined()) weights = bench::random_weights(config, dtype);
        try {
          measure(model, config, weights, point);
        } catch (const c10::OutOfMemoryError& error) {
          std::printf("{\"point\": \"%s %lldx%lld %s\", \"skipped\": \"out of memory\"}\n", model,
                      static_cast<long long>(point.batch), static_cast<long long>(point.length), point.keep.c_str());
        }
        allocator::emptyCache();
      }
      weights = {};
      allocator::emptyCache();
    }
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_plan_accuracy: %s\n", error.what());
    return 2;
  }
}
