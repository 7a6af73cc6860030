// SPDX-License-Identifier: Apache-2.0
// Optimizer steps on a GPU at the shapes of real models, with random weights that are quantized as they are made. Prints one
// line of JSON a measurement: milliseconds of the steps, tokens a second, peak memory. benchmarks/train_step_cuda.py runs it
// beside its peers.
//
//   bench_train_step MODEL BATCH SEQUENCE KEEP [STEPS [DTYPE [OPTIMIZER]]] [NAME=VALUE …] [--deterministic] [--losses] [--graph] [--count] [--names] [--serve]
//     MODEL 70b | 8b | 3b | 1b      DTYPE bf16 | fp16
//     KEEP everything | attention_only | input_only | input_on_host, a mixture: input_on_host,everything:12, or every:4 | sqrt
//     OPTIMIZER adamw_8bit | adamw | paged_adamw_8bit | paged_adamw_32bit
//     NAME=VALUE  loss_chunk_rows, mlp_tile_rows, weight_workspace, embedding_on_host, base_on_host, fp8 (0 | 1): as in TrainingArguments;
//                 batch, sequence, keep: another value than the one above; lengths: of rows that differ, 2048,700,…; cap: GiB that torch's allocator may hold, 0 none
//     --deterministic  steps with and without gradients that have the same bits in every run, in turn: what that costs, and whether
//              two runs of each from the same adapters end in the same bits. Nothing else is measured
//     --losses  STEPS steps from the same adapters, over the same four batches again and again, in 16 and in eight bits (fp8): both
//              curves. Nothing else is measured
//     --graph  the micro-step as launched by the host, and as one CUDA graph: milliseconds of both. Nothing else is measured
//     --count  one step more, under torch's profiler: kernels and memory operations launched, and the time the GPU worked
//              on kernels; "launches_a_layer" is those of a micro-step over the layers: head and loss are in it, the optimizer is not
//     --names  the same, and each kernel's launches a step on standard error
//     --serve  says {"ready": true}, then measures once for each line "SECONDS [NAME=VALUE …] [count]" that it reads, over as many
//              steps as fill the time, 8 to 60 (3 of those that take more than a second). What a line sets holds from there on. "plan [NAME=VALUE …]" is answered with the
//              peak that is planned, and nothing is set; "budget budget=14GiB effective_batch=4" with the setting that memory_budget
//              chooses. Memory is given back in between, so that several such processes can take turns on one GPU
// planned_gib is the peak by memory/planner.hpp, with the batches that wait beside the one that is trained on.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "core/check.hpp"
#include "gpu_cap.hpp"
#include "nn/decoder.hpp"
#include "nn/model_weights.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/budget.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/step.hpp"
#include "train_step_setting.hpp"

namespace {

using namespace qlorapp;
using bench::Setting;

CausalLM make_model(const format::ModelConfig& config, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCUDA);
  const auto random = [&](int64_t out, int64_t in) { return at::randn({out, in}, options).mul_(0.02); };
  const Quantizer quantizer;
  DecoderWeights weights = make_weights(config, {[&](const std::string&, const std::vector<int64_t>& shape) {
                                                   return shape.size() == 1 ? at::ones(shape, options) : random(shape[0], shape[1]);
                                                 },
                                                 [&](FrozenWeight& into, const std::string&, int64_t out, int64_t in) {
                                                   into = FrozenWeight(quantizer.quantize(random(out, in)));
                                                 }});
  return CausalLM(config, std::move(weights));
}

/// What one step put on the GPU.
struct Launches {
  int64_t kernels = 0;
  int64_t memory_operations = 0;  ///< Copies and fills.
  double busy_ms = 0;             ///< Time in which at least one kernel ran.
  std::map<std::string, int64_t> by_name;
};

template <class Step>
Launches launches_of(Step&& step) {
  namespace impl = torch::profiler::impl;
  namespace kineto = torch::autograd::profiler;
  const impl::ProfilerConfig config(impl::ProfilerState::KINETO);
  const std::set<impl::ActivityType> activities = {impl::ActivityType::CUDA};
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
  step();
  c10::cuda::device_synchronize();
  const std::unique_ptr<kineto::ProfilerResult> result = kineto::disableProfiler();
  Launches launches;
  std::vector<std::pair<uint64_t, uint64_t>> intervals;
  for (const kineto::KinetoEvent& event : result->events()) {
    if (event.deviceType() != at::kCUDA || event.durationNs() == 0) continue;
    const std::string name = event.name();
    const bool memory = name.starts_with("Memcpy") || name.starts_with("Memset");
    ++(memory ? launches.memory_operations : launches.kernels);
    ++launches.by_name[name];
    if (!memory) intervals.emplace_back(event.startNs(), event.endNs());
  }
  std::sort(intervals.begin(), intervals.end());
  uint64_t end = 0, busy = 0;
  for (const auto& [first, last] : intervals) {
    if (last > end) busy += last - std::max(first, end);
    end = std::max(end, last);
  }
  launches.busy_ms = static_cast<double>(busy) * 1e-6;
  return launches;
}

double quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5)];
}

int run(std::vector<std::string> arguments) {
  const auto flag = [&](const char* name) { return std::erase(arguments, name) > 0; };
  const bool names = flag("--names"), count = flag("--count") || names, serve = flag("--serve"),
             deterministic = flag("--deterministic"), losses = flag("--losses"), graph = flag("--graph");
  Setting setting;
  std::vector<std::string> settings;
  std::erase_if(arguments, [&](const std::string& word) {
    if (word.find('=') == std::string::npos) return false;
    settings.push_back(word);
    return true;
  });
  const auto argument = [&](size_t at, const char* standard) {
    return at < arguments.size() ? arguments[at] : std::string(standard);
  };
  const std::string model_name = argument(0, "1b");
  setting.rows = std::stoll(argument(1, "2"));
  setting.length = std::stoll(argument(2, "2048"));
  setting.keep = argument(3, "everything");
  for (const std::string& word : settings) setting.set(word);
  const int64_t steps = std::stoll(argument(4, "20"));
  const at::ScalarType dtype = argument(5, "bf16") == "fp16" ? at::kHalf : at::kBFloat16;
  const std::string optim = argument(6, "adamw_8bit");
  at::manual_seed(0);
  ops::prepare_device_memory();

  const format::ModelConfig config = bench::config_of(model_name);
  CausalLM model = make_model(config, dtype);
  model.add_adapters(bench::lora_config(), /*seed=*/0);
  AdamW::Options optimizer;
  if (optim.ends_with("_8bit")) optimizer.state = AdamW::State::kEightBit;
  optimizer.paged = optim.starts_with("paged_");
  GradScaler::Options scaler;
  scaler.device = at::kCUDA;
  scaler.enabled = dtype == at::kHalf;
  TrainState state(model.arena(), optimizer, scaler);
  state.base_learning_rate = 1e-4;
  state.max_grad_norm = 1.0;
  state.schedule.training_steps = 1 << 20;
  std::vector<Batch> batches;
  constexpr int kBatches = 4;
  const auto apply = [&] {
    bench::set_cap(0);
    model.settings().set_segments(parse_segments(setting.keep, config.num_hidden_layers));
    model.settings().set_memory(setting.memory);
    model.settings().set_float8(setting.float8);
    batches.clear();
    for (int i = 0; i < kBatches; ++i) {
      batches.push_back(setting.lengths.empty() ? bench::random_batch(setting.rows, setting.length, config.vocab_size)
                                                : bench::random_batch(setting.lengths, config.vocab_size));
    }
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    bench::set_cap(setting.cap);
  };
  const auto plan_settings = [&](const Setting& wanted) {
    PlanSettings plan = settings_of(model);
    plan.batch = wanted.rows;
    plan.length = wanted.length;
    plan.segments = parse_segments(wanted.keep, config.num_hidden_layers);
    plan.memory = wanted.memory;
    plan.float8 = wanted.float8;
    plan.optimizer_is_8bit = optim.ends_with("_8bit");
    plan.device = planned_device(model.device());
    return plan;
  };
  const auto planned_gib = [&](const Setting& wanted) {
    const int64_t other_batches = (kBatches - 1) * 3 * wanted.rows * wanted.length * 8;
    const MemoryPlan planned = plan_memory(plan_settings(wanted));
    return static_cast<double>((planned.training_peak() + Bytes{other_batches}).count) / (1 << 30);
  };

  int64_t taken = 0;
  double loss = 0;
  const auto step = [&] {
    const size_t at = static_cast<size_t>(taken) % batches.size();
    const StepReport report = train_step(model, state, std::span(&batches[at], 1));
    if (taken++ == 0) loss = report.mean_loss.item<double>();
  };
  const auto warm_up = [&] {
    step();  // allocates
    c10::cuda::device_synchronize();
    constexpr int kSteps = 4;
    const auto begin = std::chrono::steady_clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
    int done = 0;
    do {  // a step of 70B takes seconds, and one of them shows how many
      step();
      ++done;
      if (done == 1) c10::cuda::device_synchronize();
    } while (done < kSteps && seconds() < 2);
    c10::cuda::device_synchronize();
    return seconds() / done;
  };
  const auto measure = [&](int64_t timed, bool counted) {
    c10::cuda::CUDACachingAllocator::resetPeakStats(c10::cuda::current_device());
    // An event after each step and one synchronization at the end: the GPU never waits for the host to look.
    std::vector<at::cuda::CUDAEvent> events;
    for (int64_t i = 0; i <= timed; ++i) events.emplace_back(cudaEventDefault);
    events[0].record();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 1; i <= timed; ++i) {
      step();
      events[static_cast<size_t>(i)].record();
    }
    const double host = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    c10::cuda::device_synchronize();
    std::vector<double> times;
    for (size_t i = 1; i < events.size(); ++i) times.push_back(events[i - 1].elapsed_time(events[i]));
    std::vector<double> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    const int64_t rows = setting.rows, length = setting.length;
    const std::string& keep = setting.keep;
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
    const double median = quantile(sorted, 0.5);
    std::printf(
        "{\"milliseconds\": %.3f, \"low\": %.3f, \"high\": %.3f, \"tokens_per_second\": %.0f, \"peak_gib\": %.3f, "
        "\"reserved_gib\": %.3f, \"planned_gib\": %.3f, \"host_ms\": %.2f, \"loss\": %.5f, \"keep\": \"%s\"",
        median, quantile(sorted, 0.1), quantile(sorted, 0.9), static_cast<double>(rows * length) / median * 1e3,
        static_cast<double>(stats.allocated_bytes[0].peak) / (1 << 30),
        static_cast<double>(stats.reserved_bytes[0].peak) / (1 << 30), planned_gib(setting), host / static_cast<double>(timed),
        loss, keep.c_str());
    if (counted) {
      try {
        const Launches launches = launches_of(step);
        const at::Tensor one = at::ones({}, at::TensorOptions().device(at::kCUDA));
        const Launches micro = launches_of([&] { model.forward_backward(batches[0], one, {}); });
        std::printf(", \"kernels\": %ld, \"memory_operations\": %ld, \"launches_a_layer\": %.1f, \"busy\": %.4f",
                    static_cast<long>(launches.kernels), static_cast<long>(launches.memory_operations),
                    static_cast<double>(micro.kernels + micro.memory_operations) / static_cast<double>(config.num_hidden_layers),
                    launches.busy_ms / median);
        for (const auto& [name, launched] : launches.by_name) {
          if (names) std::fprintf(stderr, "%6ld  %s\n", static_cast<long>(launched), name.c_str());
        }
      } catch (const std::exception& error) { std::fprintf(stderr, "bench_train_step: no profiler: %s\n", error.what()); }
    }
    std::printf(", \"steps_ms\": [");
    for (size_t i = 0; i < times.size(); ++i) std::printf("%s%.3f", i ? ", " : "", times[i]);
    std::printf("]}\n");
    std::fflush(stdout);
  };
  apply();
  const at::Tensor adapters_before = deterministic || losses ? model.arena().values().clone() : at::Tensor();
  const auto restart = [&] {
    at::Tensor(model.arena().values()).copy_(adapters_before);
    state = TrainState(model.arena(), optimizer, scaler);
    state.base_learning_rate = 1e-4;
    state.max_grad_norm = 1.0;
    state.schedule.training_steps = 1 << 20;
  };
  if (losses) {
    for (const bool eight_bits : {false, true}) {
      restart();
      model.settings().set_float8(eight_bits);
      std::vector<at::Tensor> curve;
      for (int64_t i = 0; i < steps; ++i) {
        curve.push_back(train_step(model, state, std::span(&batches[static_cast<size_t>(i) % batches.size()], 1)).mean_loss);
      }
      const at::Tensor all = at::stack(curve).to(at::kCPU, at::kFloat);
      std::printf("{\"fp8\": %s, \"losses\": [", eight_bits ? "true" : "false");
      for (int64_t i = 0; i < steps; ++i) std::printf("%s%.5f", i ? ", " : "", static_cast<double>(all.data_ptr<float>()[i]));
      std::printf("]}\n");
    }
    return 0;
  }
  if (graph) {
    const at::Tensor scale = at::ones({}, at::TensorOptions().device(at::kCUDA));
    const c10::cuda::CUDAStreamGuard side(c10::cuda::getStreamFromPool());
    c10::cuda::device_synchronize();
    const auto micro_step = [&] { return model.forward_backward(batches[0], scale, {}).loss; };
    micro_step();
    c10::cuda::device_synchronize();
    at::cuda::CUDAGraph captured;
    captured.capture_begin();
    const at::Tensor loss_of_graph = micro_step();
    captured.capture_end();
    const auto timed = [&](auto&& run) {
      std::vector<double> times;
      for (int64_t i = 0; i < steps; ++i) {
        at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
        begin.record();
        for (int j = 0; j < 4; ++j) run();
        end.record();
        c10::cuda::device_synchronize();
        times.push_back(begin.elapsed_time(end) / 4);
      }
      std::sort(times.begin(), times.end());
      return quantile(times, 0.5);
    };
    const double host = timed(micro_step), replayed = timed([&] { captured.replay(); });
    std::printf("{\"micro_step_ms\": %.3f, \"graph_ms\": %.3f, \"gain\": %.3f}\n", host, replayed, host / replayed);
    return 0;
  }
  if (deterministic) {
    const auto result_of = [&](bool wanted) {
      model.settings().set_deterministic(wanted);
      restart();
      taken = 1;
      for (int i = 0; i < 4; ++i) step();
      return model.arena().values().clone();
    };
    step();
    for (const bool wanted : {false, true}) {
      const bool same = at::equal(result_of(wanted), result_of(wanted));
      std::fprintf(stderr, "%s: the adapters of two runs of four steps %s\n", wanted ? "deterministic" : "as usual",
                   same ? "have the same bits" : "differ");
    }
    std::array<std::vector<double>, 2> times;  // in turn: the card's clock drifts
    for (int round = 0; round < 3; ++round) {
      for (const size_t wanted : {size_t{0}, size_t{1}}) {
        model.settings().set_deterministic(wanted == 1);
        times[wanted].push_back(warm_up());
        times[wanted].push_back(warm_up());
      }
    }
    for (auto& all : times) std::sort(all.begin(), all.end());
    std::printf("{\"milliseconds\": %.3f, \"deterministic\": %.3f, \"cost\": %.4f}\n", quantile(times[0], 0.5) * 1e3,
                quantile(times[1], 0.5) * 1e3, quantile(times[1], 0.5) / quantile(times[0], 0.5) - 1);
    return 0;
  }
  if (!serve) {
    warm_up();
    measure(steps, count);
    return 0;
  }
  const auto rest = [] {
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
  };
  step();
  rest();
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string first, word;
    words >> first;
    const Setting before = setting;
    bool counted = false, changed = false;
    try {
      while (words >> word) {
        if (setting.set(word)) changed = true;
        else counted = word == "count";
      }
      if (first == "budget") {
        Setting plain = before;
        plain.memory = {};
        const BudgetChoice choice =
            fit_budget(plan_settings(plain), rates_of(gpu_name(model.device()), gpu_architecture(model.device()), {}),
                       {parse_bytes("budget", setting.budget), setting.effective_batch});
        Setting chosen = before;
        chosen.rows = choice.settings.batch;
        chosen.keep = choice.keep;
        chosen.memory = choice.settings.memory;
        std::printf("{\"setting\": \"%s\"}\n", chosen.words().c_str());
        std::fflush(stdout);
        setting = before;
        continue;
      }
      if (first == "plan") {
        std::printf("{\"planned_gib\": %.4f}\n", planned_gib(setting));
        std::fflush(stdout);
        setting = before;
        continue;
      }
      if (changed) apply();
      const double each = warm_up();
      measure(std::clamp<int64_t>(static_cast<int64_t>(std::stod(first) / each), each > 1 ? 3 : 8, 60), counted);
    } catch (const c10::OutOfMemoryError& error) {
      std::printf("{\"error\": \"out of memory\"}\n");
      std::fflush(stdout);
      c10::cuda::device_synchronize();
    }
    rest();
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_train_step: %s\n", error.what());
    return 2;
  }
}
