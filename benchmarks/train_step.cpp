// SPDX-License-Identifier: Apache-2.0
// Optimizer steps on a GPU at the shapes of real models, with random weights that are quantized as they are made. Prints one
// line of JSON a measurement: milliseconds of the steps, tokens a second, peak memory. benchmarks/train_step_cuda.py runs it
// beside its peers.
//
//   bench_train_step MODEL BATCH SEQUENCE KEEP [STEPS [DTYPE [OPTIMIZER]]] [--deterministic] [--count] [--names] [--serve]
//     MODEL 8b | 3b | 1b      KEEP everything | attention_only | input_only | input_on_host      DTYPE bf16 | fp16
//     OPTIMIZER adamw_8bit | adamw | paged_adamw_8bit | paged_adamw_32bit
//     --deterministic  steps with and without gradients that have the same bits in every run, in turn: what that costs, and
//     whether
//              two runs of each from the same adapters end in the same bits. Nothing else is measured
//     --count  one step more, under torch's profiler: kernels and memory operations launched, and the time the GPU worked
//              on kernels; "launches_a_layer" is all of them over the layers, so head, loss and optimizer are in it
//     --names  the same, and each kernel's launches a step on standard error
//     --serve  says {"ready": true}, then measures once for each line "SECONDS [count]" that it reads, over as many steps as
//              fill the time, 8 to 60. Memory is given back in between, so that several such processes can take turns on one GPU
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
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "qlorapp/core/check.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/step.hpp"

namespace {

using namespace qlorapp;

format::ModelConfig config_of(const std::string& model) {
  const auto json = [](int hidden, int intermediate, int layers, int heads, int head_dim, bool tied) {
    return concat(
        R"({"model_type":"llama","architectures":["LlamaForCausalLM"],"hidden_act":"silu","hidden_size":)", hidden,
        R"(,"intermediate_size":)", intermediate, R"(,"num_hidden_layers":)", layers, R"(,"num_attention_heads":)", heads,
        R"(,"num_key_value_heads":8,"head_dim":)", head_dim,
        R"(,"vocab_size":128256,"max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"tie_word_embeddings":)",
        tied, "}");
  };
  if (model == "8b") return format::parse_model_config(json(4096, 14336, 32, 32, 128, false), model);
  if (model == "3b") return format::parse_model_config(json(3072, 8192, 28, 24, 128, true), model);
  if (model == "1b") return format::parse_model_config(json(2048, 8192, 16, 32, 64, true), model);
  throw ValueError(concat("MODEL must be 8b, 3b or 1b; got ", model));
}

CausalLM make_model(const format::ModelConfig& config, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCUDA);
  const auto random = [&](int64_t out, int64_t in) { return at::randn({out, in}, options).mul_(0.02); };
  const Quantizer quantizer;
  const auto linear = [&](int64_t out, int64_t in) { return FrozenWeight(quantizer.quantize(random(out, in))); };
  const int64_t d = config.hidden_size, i = config.intermediate_size;
  const int64_t q = config.num_attention_heads * config.head_dim, kv = config.num_key_value_heads * config.head_dim;
  CausalLM::Weights weights;
  weights.embed_tokens = random(config.vocab_size, d);
  weights.lm_head = config.tie_word_embeddings ? weights.embed_tokens : random(config.vocab_size, d);
  weights.norm = at::ones({d}, options);
  for (int64_t block = 0; block < config.num_hidden_layers; ++block) {
    weights.blocks.push_back(
        {at::ones({d}, options),
         at::ones({d}, options),
         {linear(q, d), linear(kv, d), linear(kv, d), linear(d, q), linear(i, d), linear(i, d), linear(d, i)}});
  }
  return CausalLM(config, std::move(weights));
}

Batch make_batch(int64_t rows, int64_t length, int64_t vocabulary) {
  Batch batch;
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCUDA);
  batch.tokens = at::randint(0, vocabulary, {rows * length}, options);
  batch.targets = at::roll(batch.tokens, -1);
  batch.positions = at::arange(length, options).repeat({rows});
  for (int64_t row = 0; row <= rows; ++row) {
    batch.row_starts.push_back(row * length);
    if (row > 0) batch.targets[row * length - 1] = Batch::kIgnoredTarget;
  }
  batch.target_count = rows * (length - 1);
  return batch;
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
             deterministic = flag("--deterministic");
  const auto argument = [&](size_t at, const char* standard) {
    return at < arguments.size() ? arguments[at] : std::string(standard);
  };
  const std::string model_name = argument(0, "1b"), keep = argument(3, "everything");
  const int64_t rows = std::stoll(argument(1, "2")), length = std::stoll(argument(2, "2048")),
                steps = std::stoll(argument(4, "20"));
  const at::ScalarType dtype = argument(5, "bf16") == "fp16" ? at::kHalf : at::kBFloat16;
  const std::string optim = argument(6, "adamw_8bit");
  const Keep policy = parse_keep(keep);
  at::manual_seed(0);

  const format::ModelConfig config = config_of(model_name);
  CausalLM model = make_model(config, dtype);
  LoraConfig lora;
  lora.r = 16;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
  model.add_adapters(lora, /*seed=*/0);
  model.set_segments(keep_in_each_block(config.num_hidden_layers, policy));
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
  for (int i = 0; i < 4; ++i) batches.push_back(make_batch(rows, length, config.vocab_size));

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
    for (int i = 0; i < kSteps; ++i) step();
    c10::cuda::device_synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kSteps;
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
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
    const double median = quantile(sorted, 0.5);
    std::printf(
        "{\"milliseconds\": %.3f, \"low\": %.3f, \"high\": %.3f, \"tokens_per_second\": %.0f, \"peak_gib\": %.3f, "
        "\"host_ms\": %.2f, \"loss\": %.5f, \"keep\": \"%s\"",
        median, quantile(sorted, 0.1), quantile(sorted, 0.9), static_cast<double>(rows * length) / median * 1e3,
        static_cast<double>(stats.allocated_bytes[0].peak) / (1 << 30), host / static_cast<double>(timed), loss, keep.c_str());
    if (counted) {
      try {
        const Launches launches = launches_of(step);
        std::printf(
            ", \"kernels\": %ld, \"memory_operations\": %ld, \"launches_a_layer\": %.1f, \"busy\": %.4f",
            static_cast<long>(launches.kernels), static_cast<long>(launches.memory_operations),
            static_cast<double>(launches.kernels + launches.memory_operations) / static_cast<double>(config.num_hidden_layers),
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
  if (deterministic) {
    const at::Tensor first = model.arena().values().clone();
    const auto result_of = [&](bool wanted) {
      model.set_deterministic(wanted);
      at::Tensor(model.arena().values()).copy_(first);
      state = TrainState(model.arena(), optimizer, scaler);
      state.base_learning_rate = 1e-4;
      state.max_grad_norm = 1.0;
      state.schedule.training_steps = 1 << 20;
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
        model.set_deterministic(wanted == 1);
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
    double seconds = 0;
    std::string word;
    words >> seconds >> word;
    measure(std::clamp<int64_t>(static_cast<int64_t>(seconds / warm_up()), 8, 60), word == "count");
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
