// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint onto a GPU, adds adapters and optimizer, and takes one optimizer step of random tokens. Prints a line of
// JSON when the model is trainable and one when the step is done. benchmarks/load_cuda.py runs it beside its peer.
//
//   bench_load FOLDER [SEQUENCE]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "qlorapp/io/load_model.hpp"
#include "qlorapp/train/step.hpp"

namespace {

using namespace qlorapp;

double gib(int64_t bytes) { return static_cast<double>(bytes) / (int64_t{1} << 30); }

/// VmHWM or VmRSS, in MiB.
double resident(const char* key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::strtod(line.c_str() + std::strlen(key) + 1, nullptr) / 1024;
  }
  return 0;
}

int run(const std::string& folder, int64_t length) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const auto start = Clock::now();
  const at::Device device(at::kCUDA, 0);
  (void)at::zeros({1}, device);  // the context
  const auto stats = [] { return c10::cuda::CUDACachingAllocator::getDeviceStats(0); };
  const double context = since(start);
  const double before_mib = resident("VmRSS");

  const auto begin = Clock::now();
  LoadOptions options;
  options.device = device;
  options.compute_dtype = at::kBFloat16;
  CausalLM model = load_model(folder, options);
  c10::cuda::device_synchronize();
  const double loaded = since(begin);
  const double peak = gib(stats().allocated_bytes[0].peak), reserved = gib(stats().reserved_bytes[0].peak),
               final = gib(stats().allocated_bytes[0].current);
  const double high = resident("VmHWM"), after_mib = resident("VmRSS");
  LoraConfig lora;
  lora.r = 16;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
  model.add_adapters(lora, /*seed=*/0);
  c10::cuda::device_synchronize();
  std::printf(
      "{\"event\": \"trainable\", \"seconds\": %.4f, \"load_s\": %.4f, \"context_s\": %.4f, \"peak_gib\": %.3f, \"final_gib\": "
      "%.3f, "
      "\"reserved_gib\": %.3f, \"hwm_mib\": %.0f, \"rss_before_mib\": %.0f, \"rss_mib\": %.0f}\n",
      since(begin), loaded, context, peak, final, reserved, high, before_mib, after_mib);
  std::fflush(stdout);

  AdamW::Options optimizer;
  optimizer.state = AdamW::State::kEightBit;
  GradScaler::Options scaler;
  scaler.device = at::kCUDA;
  scaler.enabled = false;
  TrainState state(model.arena(), optimizer, scaler);
  state.base_learning_rate = 1e-4;
  state.max_grad_norm = 1.0;
  state.schedule.training_steps = 1 << 20;
  Batch batch;
  batch.tokens = at::randint(0, model.config().vocab_size, {length}, at::TensorOptions().dtype(at::kLong).device(device));
  batch.targets = at::roll(batch.tokens, -1);
  batch.targets[length - 1] = Batch::kIgnoredTarget;
  batch.positions = at::arange(length, batch.tokens.options());
  batch.row_starts = {0, length};
  batch.target_count = length - 1;
  const double loss = train_step(model, state, std::span(&batch, 1)).mean_loss.item<double>();
  c10::cuda::device_synchronize();
  std::printf("{\"event\": \"step\", \"loss\": %.4f}\n", loss);
  return 0;
}

}  // namespace

int main(int count, char** values) {
  if (count < 2) {
    std::fprintf(stderr, "usage: bench_load FOLDER [SEQUENCE]\n");
    return 2;
  }
  try {
    return run(values[1], count > 2 ? std::stoll(values[2]) : 2048);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_load: %s\n", error.what());
    return 2;
  }
}
