// SPDX-License-Identifier: Apache-2.0
// What checkpointing costs and buys, as it is taught (every layer, every k-th, √N) and as it is here: an optimizer step of a random
// model with each, in turn, on a CPU or a GPU. Prints a line of JSON a setting; benchmarks/checkpointing.py makes the table.
//
//   bench_checkpointing DEVICE MODEL BATCH SEQUENCE ROUNDS KEEP…
//     DEVICE cpu | cuda     MODEL 70b | 8b | 3b | 1b | tiny (16 layers of hidden size 512)     KEEP  as checkpoint_keep has it
// Every setting takes one step that is not counted, and then one a round, round after round, so that a clock that drifts, or a
// neighbor that wakes up, does so for all of them. float32 on a CPU, bfloat16 on a GPU; adamw_8bit. Bytes are those of torch's own allocator.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/check.hpp"
#include "nn/model_weights.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/step.hpp"
#include "train_step_setting.hpp"

namespace {

using namespace qlorapp;

format::ModelConfig config_of(const std::string& model) {
  if (model != "tiny") return bench::config_of(model);
  return format::parse_model_config(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","hidden_size":512,"intermediate_size":1408,
          "num_hidden_layers":16,"num_attention_heads":8,"num_key_value_heads":4,"vocab_size":8192,"max_position_embeddings":4096,
          "rms_norm_eps":1e-5,"tie_word_embeddings":true})",
      "tiny");
}

CausalLM make_model(const format::ModelConfig& config, at::Device device, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const Quantizer quantizer;
  return {config, make_weights(config, {[&](const std::string&, const std::vector<int64_t>& shape) {
                                          return shape.size() == 1 ? at::ones(shape, options)
                                                                   : at::empty(shape, options).normal_(0, 0.02);
                                        },
                                        [&](FrozenWeight& into, const std::string&, int64_t out, int64_t in) {
                                          into = FrozenWeight(quantizer.quantize(at::empty({out, in}, options).normal_(0, 0.02)));
                                        }})};
}

struct Measured {
  std::string keep;
  std::vector<double> seconds;
  int64_t rest = 0, peak = 0;  ///< Bytes before a step, and in it.
};

int run(const std::vector<std::string>& arguments) {
  QLORAPP_CHECK_VALUE(arguments.size() >= 6, "bench_checkpointing DEVICE MODEL BATCH SEQUENCE ROUNDS KEEP…");
  const at::Device device = parse_device(arguments[0]);
  const format::ModelConfig config = config_of(arguments[1]);
  const int64_t rows = std::stoll(arguments[2]), length = std::stoll(arguments[3]), rounds = std::stoll(arguments[4]);
  std::vector<Measured> settings;
  for (size_t i = 5; i < arguments.size(); ++i) settings.push_back({arguments[i], {}});
  at::manual_seed(0);

  const at::ScalarType dtype = device.is_cpu() ? at::kFloat : at::kBFloat16;
  MeasuredMemory memory(MeasuredMemory::Options{device.type(), {}, false});
  CausalLM model = make_model(config, device, dtype);
  model.add_adapters(bench::lora_config(), /*seed=*/0);
  AdamW::Options optimizer;
  optimizer.state = AdamW::State::kEightBit;
  TrainState state(model.arena(), optimizer, {.device = device.type(), .enabled = false});
  state.base_learning_rate = 1e-4;
  state.max_grad_norm = 1.0;
  state.schedule.training_steps = 1 << 20;
  const Batch batch =
      Batch::of_equal_rows(at::randint(0, config.vocab_size, {rows, length}, at::TensorOptions().dtype(at::kLong).device(device)));
  const auto synchronize = [&] {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.has_index() ? device.index() : 0);
  };
  for (int64_t round = 0; round <= rounds; ++round) {
    for (Measured& setting : settings) {
      model.settings().set_segments(parse_segments(setting.keep, config.num_hidden_layers));
      synchronize();
      memory.reset_peak();
      setting.rest = memory.live();
      const auto begin = std::chrono::steady_clock::now();
      static_cast<void>(train_step(model, state, std::span(&batch, 1)));
      synchronize();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      if (round == 0) continue;
      setting.seconds.push_back(seconds);
      setting.peak = std::max(setting.peak, memory.peak());
    }
  }
  for (Measured& setting : settings) {
    std::sort(setting.seconds.begin(), setting.seconds.end());
    std::printf("{\"keep\": \"%s\", \"seconds\": %.5f, \"low\": %.5f, \"high\": %.5f, \"rest\": %lld, \"peak\": %lld}\n",
                setting.keep.c_str(), setting.seconds[setting.seconds.size() / 2], setting.seconds.front(), setting.seconds.back(),
                static_cast<long long>(setting.rest), static_cast<long long>(setting.peak));
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_checkpointing: %s\n", error.what());
    return 2;
  }
}
