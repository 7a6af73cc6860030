// SPDX-License-Identifier: Apache-2.0
// Optimizer steps on one or several GPUs of a machine at the shapes of real models, with random weights. Rank 0 prints one line of JSON for
// each way. benchmarks/ranks_cuda.py runs it with one process and with two.
//
//   [torchrun --nproc-per-node N --no-python] bench_ranks MODEL BATCH SEQUENCE KEEP ACCUMULATION SECONDS [WAY …] [NAME=VALUE …]
//     WAY  whole: each rank has the whole base.  sharded: base_sharding=full.  Both if none is given.  rate: no model; gathers pieces as long
//          as a packed block of 8B and of 70B, and prints the bytes that a rank receives per second.
//     NAME=VALUE  as of bench_train_step; cap counts for "sharded".  trace=FILE: after the timed steps rank 0 records two more as a Chrome
//                 trace. "x.json" becomes "x.sharded.json".
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "core/check.hpp"
#include "gpu_cap.hpp"
#include "nn/block_weights.hpp"
#include "nn/decoder.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/step.hpp"
#include "random_weights.hpp"
#include "train_step_setting.hpp"

namespace {

using namespace qlorapp;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

int64_t packed_shard_bytes(const format::ModelConfig& config, int64_t ranks) {
  BlockForms forms;
  for (const format::Parameter& linear : format::parameters(config, format::Role::kLinear))
    if (linear.layer == 0) forms.push_back({linear.shape, at::kBFloat16, Quantizer::Options{}});
  return shard_bytes(forms, ranks);
}

void measure_rate(const std::string& model_name, Communicator& ranks) {
  const int64_t shard = packed_shard_bytes(bench::config_of(model_name), ranks.size());
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
  const at::Tensor mine = at::zeros({shard}, options), all = at::empty({ranks.size() * shard}, options);
  constexpr int kWarmUp = 5, kTimed = 20;
  std::vector<double> times;
  for (int i = 0; i < kWarmUp + kTimed; ++i) {
    c10::cuda::device_synchronize();
    const auto begin = Clock::now();
    ranks.all_gather_into(all, mine).wait();
    c10::cuda::device_synchronize();
    if (i >= kWarmUp) times.push_back(seconds_since(begin));
  }
  std::sort(times.begin(), times.end());
  if (!ranks.is_first()) return;
  const double median = (times[kTimed / 2 - 1] + times[kTimed / 2]) / 2;
  std::printf("{\"way\": \"rate\", \"ranks\": %ld, \"megabytes\": %.1f, \"bytes_per_second\": %.0f}\n",
              static_cast<long>(ranks.size()), static_cast<double>(all.numel()) * 1e-6,
              static_cast<double>((ranks.size() - 1) * shard) / median);
  std::fflush(stdout);
}

/// Every rank runs the steps; rank 0 writes FILE with the way before its extension.
template <class Step>
void trace_steps(const std::string& file, const std::string& way, const Communicator& ranks, Step&& step) {
  namespace impl = torch::profiler::impl;
  namespace kineto = torch::autograd::profiler;
  const impl::ProfilerConfig config(impl::ProfilerState::KINETO);
  const std::set<impl::ActivityType> activities = {impl::ActivityType::CUDA};
  if (ranks.is_first()) {
    kineto::prepareProfiler(config, activities);
    kineto::enableProfiler(config, activities);
  }
  for (int i = 0; i < 2; ++i) step();
  c10::cuda::device_synchronize();
  if (!ranks.is_first()) return;
  const std::filesystem::path path(file);
  kineto::disableProfiler()->save(std::filesystem::path(path).replace_extension("." + way + path.extension().string()).string());
}

void measure(const std::string& way, const std::string& model_name, const bench::Setting& setting, int64_t accumulation,
             double seconds, const std::string& trace, const std::shared_ptr<Communicator>& ranks) {
  at::manual_seed(0);  // the same weights on all ranks
  const format::ModelConfig config = bench::config_of(model_name);
  DecoderWeights weights = bench::random_weights(config, at::kBFloat16);
  if (way == "sharded") bench::shard(weights, ranks);
  CausalLM model(config, std::move(weights));
  model.add_adapters(bench::lora_config(), /*seed=*/0);
  TrainState state(model.arena(), {.state = AdamW::State::kEightBit}, {.device = at::kCUDA, .enabled = false});
  state.base_learning_rate = 1e-4;
  state.max_grad_norm = 1.0;
  state.schedule.training_steps = 1 << 20;
  state.ranks = ranks;
  model.settings().set_segments(parse_segments(setting.keep, config.num_hidden_layers));
  model.settings().set_memory(setting.memory);
  at::manual_seed(static_cast<uint64_t>(1 + ranks->rank()));
  std::vector<Batch> window;
  for (int64_t i = 0; i < accumulation; ++i) window.push_back(bench::random_batch(setting.rows, setting.length, config.vocab_size));
  c10::cuda::device_synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  if (way == "sharded") bench::set_cap(setting.cap);

  at::Tensor first;
  const auto step = [&] {
    const StepReport report = train_step(model, state, std::span<const Batch>(window));
    if (!first.defined()) first = report.mean_loss;
  };
  const auto timed = [&](int64_t steps) {
    c10::cuda::device_synchronize();
    ranks->barrier();
    const auto begin = Clock::now();
    for (int64_t i = 0; i < steps; ++i) step();
    c10::cuda::device_synchronize();
    ranks->barrier();
    return seconds_since(begin) / static_cast<double>(steps);
  };
  step();
  const double each = timed(2);
  c10::cuda::CUDACachingAllocator::resetPeakStats(c10::cuda::current_device());
  const auto steps = std::max<int64_t>(3, static_cast<int64_t>(seconds / each));
  std::vector<double> times;
  const int64_t wanted = sum_over(*ranks, {ranks->is_first() ? steps : 0})[0];  // rank 0 decides
  for (int part = 0; part < 3; ++part) times.push_back(timed((wanted + 2) / 3));
  std::sort(times.begin(), times.end());
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  PlanSettings plan = settings_of(model);
  plan.batch = setting.rows;
  plan.length = setting.length;
  plan.accumulation = accumulation;
  plan.optimizer_is_8bit = true;
  plan.device = planned_device(model.device());
  const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  const auto tokens = static_cast<double>(setting.rows * setting.length * accumulation * ranks->size());
  const double peak = gib(stats.allocated_bytes[0].peak), loss = first.item<double>();
  const double planned = gib(plan_memory(plan).training_peak().count);
  if (ranks->is_first()) {
    std::printf(
        "{\"way\": \"%s\", \"ranks\": %ld, \"milliseconds\": %.2f, \"low\": %.2f, \"high\": %.2f, \"tokens_per_second\": %.0f, "
        "\"peak_gib\": %.4f, \"planned_gib\": %.4f, \"reserved_gib\": %.3f, \"loss\": %.7f}\n",
        way.c_str(), static_cast<long>(ranks->size()), times[1] * 1e3, times[0] * 1e3, times[2] * 1e3, tokens / times[1], peak,
        planned, gib(stats.reserved_bytes[0].peak), loss);
    std::fflush(stdout);
  }
  if (!trace.empty()) trace_steps(trace, way, *ranks, step);
  bench::set_cap(0);
}

int run(const std::vector<std::string>& arguments) {
  QLORAPP_CHECK_VALUE(arguments.size() >= 6,
                      "usage: bench_ranks MODEL BATCH SEQUENCE KEEP ACCUMULATION SECONDS [WAY …] [NAME=VALUE …]");
  bench::Setting setting;
  setting.rows = std::stoll(arguments[1]);
  setting.length = std::stoll(arguments[2]);
  setting.keep = arguments[3];
  std::vector<std::string> ways;
  std::string trace;
  for (size_t i = 6; i < arguments.size(); ++i) {
    if (arguments[i].starts_with("trace=")) trace = arguments[i].substr(6);
    else if (!setting.set(arguments[i])) ways.push_back(arguments[i]);
  }
  if (ways.empty()) ways = {"whole", "sharded"};
  const Launch launch = launch_of_environment();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(launch.local_rank));
  const c10::DeviceGuard guard(device);
  ops::prepare_device_memory();
  const auto ranks = communicator_of(launch, device);
  for (const std::string& way : ways) {
    try {
      if (way == "rate") {
        for (const char* model : {"8b", "70b"}) measure_rate(model, *ranks);
      } else {
        measure(way, arguments[0], setting, std::stoll(arguments[4]), std::stod(arguments[5]), trace, ranks);
      }
    } catch (const c10::OutOfMemoryError& error) {
      if (ranks->is_first()) std::printf("{\"way\": \"%s\", \"error\": \"out of memory\"}\n", way.c_str());
      ranks->report_failure("out of memory");
      return 3;
    }
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_ranks: %s\n", error.what());
    return 2;
  }
}
