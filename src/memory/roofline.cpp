// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/roofline.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

/// Of the published bandwidth: a copy on an H200 moved 4,190 of 4,800 GB/s, elementwise kernels 0.9 of that and more.
constexpr double kBandwidthPart = 0.87 * 0.95;

/// Attention on an H200 (docs/performance.md's machine), as parts of the sustained tensor rate, and the length at which half of
/// it is reached: cuDNN 385 forward and 306 backward TFLOP/s at 2,048 tokens, 597 and 483 at 8,192; flash and the efficient
/// kernel beside it at 2,048. On a smaller GPU the matrix units are slower and the same kernels come closer to them.
struct AttentionRate {
  double forward, backward, half_length;
};
AttentionRate attention_rate(int64_t architecture) {
  if (architecture / 10 == 9 || architecture / 10 == 10) return {1.09, 0.89, 1900};
  if (architecture >= 80) return {0.85, 0.65, 1000};
  return {0.60, 0.50, 200};
}

/// Kernels a block launches in a micro-batch, and seconds that the host takes for one: 1,533 in 22.4 ms for 16 blocks,
/// host-bound.
constexpr double kLaunchesABlock = 90, kSecondsALaunch = 14e-6;

/// Speed of products in eight bits relative to 16, of the published 2: it explains the steps of
/// docs/performance.md's table of them.
constexpr double kFloat8Gain = 1.7;

/// Of the published float32 rate, extrapolated from the sustained rate of products in 16 bits.
constexpr double kFloat32Part = 0.67;

/// Elements of the linear layers, of those that are computed again, and of the MLPs; seconds that an element's dequantization takes.
struct Weights {
  double linear, recomputed, mlp, seconds;
};

/// What MemorySettings and inputs on the host cost beside the products.
double memory_settings_time(const PlanSettings& settings, double tokens, const Weights& weights) {
  constexpr double kBus = 25e9;  // bytes per second that kernels read over PCIe, of 64 GB/s on an H200; half of that is a T4's
  const MemorySettings& memory = settings.memory;
  const double input = tokens * static_cast<double>(settings.model.hidden_size) * 2;
  double seconds = memory.embedding_on_host ? input / kBus : 0;
  for (const Segment& segment : settings.segments) {
    if (segment.keep == Keep::kInputOnHost) seconds += input / (20 * kBus);  // beside the computation, but not quite for nothing
  }
  if (memory.weight_workspace == WeightWorkspace::kLayer) return seconds;
  seconds += weights.recomputed * weights.seconds;  // the recompute's weights are gone when the gradient needs them
  if (memory.mlp_tile_rows > 0 && weights.linear > 0) {
    const double tiles = std::ceil(tokens / static_cast<double>(memory.mlp_tile_rows));
    // Each tile more: gate, up and down forward, gate and up again, all three for the gradient.
    seconds += (tiles - 1) * (8.0 / 3) * weights.mlp * weights.seconds * weights.recomputed / weights.linear;
  }
  return seconds;
}

/// Of the base's blocks in one micro-batch: forward all but the first two, backward all but the last two, and those of a segment of
/// several blocks once more, whose forward pass runs again (nn/weight_stream.hpp).
double copy_seconds(const PlanSettings& settings, const Gpu& gpu, double linear) {
  const bool on_host = settings.memory.base_on_host;
  if ((!on_host && settings.base_shards == 1) || settings.device.type != at::kCUDA) return 0;
  const double scales = settings.quantization.double_quant ? 1.0 : 4.0;  // bytes each
  const double element = settings.load_in_4bit ? 0.5 + scales / static_cast<double>(settings.quantization.block_size)
                                               : static_cast<double>(c10::elementSize(settings.compute_dtype));
  const int64_t layers = settings.model.num_hidden_layers;
  int64_t copies = 2 * std::max<int64_t>(0, layers - 2);
  for (const Segment& segment : settings.segments) copies += segment.end - segment.begin > 1 ? segment.end - segment.begin : 0;
  const double bytes = linear * element * static_cast<double>(copies) / static_cast<double>(layers);
  if (on_host) return bytes / gpu.host_rate();
  const auto ranks = static_cast<double>(settings.base_shards);
  return bytes * (ranks - 1) / ranks / gpu.peer_rate();  // a rank has its own part
}

}  // namespace

StepTime step_time(const PlanSettings& settings, const Gpu& gpu, double average_length) {
  const bool wide = settings.compute_dtype == at::kFloat && settings.device.type == at::kCUDA;
  QLORAPP_CHECK_VALUE(
      gpu.bandwidth > 0 && gpu.tensor_rate > 0 && (!wide || gpu.float32_rate > 0),
      "[plan] time estimates need this GPU's rates. Give --gpu_bandwidth (GB/s) and --gpu_tflops (dense 16-bit) with "
      "--bf16 or --fp16, or name a GPU of the table.");
  const format::ModelConfig& model = settings.model;
  const double tokens = static_cast<double>(settings.batch) * average_length, layers = static_cast<double>(model.num_hidden_layers);
  double linear = 0, down = 0, mlp = 0, lora = 0, recomputed = 0, recomputed_attention = 0;
  for (const format::Parameter& layer : format::parameters(model, format::Role::kLinear)) {
    const double elements = static_cast<double>(layer.shape[0]) * static_cast<double>(layer.shape[1]);
    linear += elements;
    const format::Group group = model.family->linears[layer.slot].group;
    if (group == format::Group::kDown) down += elements;
    if (group == format::Group::kDown || group == format::Group::kGateUp) mlp += elements;
    if (settings.lora.matches(layer.module))
      lora += static_cast<double>(settings.lora.rank_of(layer.module) * (layer.shape[0] + layer.shape[1]));
  }
  for (const Segment& segment : settings.segments) {
    const double part = static_cast<double>(segment.end - segment.begin) / layers;
    const bool several = segment.end - segment.begin > 1;
    if (segment.keep == Keep::kEverything && !several) continue;
    // Of several blocks all but the last run their whole forward pass again.
    recomputed += several ? linear * part - down / layers : (linear - down) * part;
    if (segment.keep != Keep::kAttentionOnly) recomputed_attention += part;
  }
  const double vocabulary = static_cast<double>(model.vocab_size), hidden = static_cast<double>(model.hidden_size);
  const double intermediate = static_cast<double>(model.intermediate_size);
  const double query = static_cast<double>(model.num_attention_heads * model.head_dim);
  const double keys = static_cast<double>(model.num_key_value_heads * model.head_dim);
  const double rate = wide ? gpu.float32_rate * kFloat32Part : gpu.tensor_rate * gpu.sustained;
  const double frozen_rate = rate * (settings.float8 ? kFloat8Gain : 1), bandwidth = gpu.bandwidth * kBandwidthPart;

  StepTime time;
  time.evidence = wide ? Evidence::kExtrapolated : gpu.evidence;
  // Fewer rows of logits at a time are products of a worse shape: 1,024 and 512 instead of 2,048 cost an H200 0.2 and 0.6 % of a step.
  const auto chunk = static_cast<double>(settings.memory.loss_chunk_rows_on(/*gpu=*/true, model.vocab_size));
  const double head = 4 * vocabulary * hidden * (1 + std::max(0.0, 100 / chunk - 100.0 / 2048));
  time.products = tokens * ((4 * linear + 2 * recomputed) / frozen_rate + (6 * lora + head) / rate);

  const AttentionRate kernel = attention_rate(gpu.architecture);
  const double reached = average_length / (average_length + kernel.half_length) * (model.head_dim < 128 ? 0.75 : 1.0);
  const double work = tokens * layers * average_length * query;
  time.attention = (2 * work * (1 + recomputed_attention) / kernel.forward + 5 * work / kernel.backward) / (rate * reached);

  const double element = settings.compute_dtype == at::kFloat ? 4 : 2;  // bytes
  // Codes and scales read, the weight written; the product's own read is its own.
  const double dequantized = 0.5 + 1.0 / 64 + (settings.float8 ? 1 : element);
  const double forward = 8 * hidden + 2 * (query + keys) + 3 * intermediate,
               backward = 8 * hidden + 2 * (query + keys) + 6 * intermediate;
  double adapters = 6 * hidden + 3 * query + 2 * keys + 4 * intermediate;
  if (settings.float8) {
    // Inputs and gradients are read in 16 bits and written in eight; the low-rank update is a product of its own, added to the output.
    const double inputs = 2 * hidden + query + intermediate, outputs = (query + 2 * keys) + hidden + 2 * intermediate + hidden;
    adapters += 1.5 * (inputs + outputs) + 2 * (inputs + outputs);
  }
  const double again = forward * (linear > 0 ? recomputed / linear : 0);
  time.memory =
      (2 * linear * dequantized + tokens * element * (layers * (forward + backward + again + adapters) + 3 * vocabulary)) /
      bandwidth;
  time.memory += memory_settings_time(settings, tokens, {linear, recomputed, mlp, dequantized / bandwidth});
  time.host = layers * kLaunchesABlock * kSecondsALaunch;
  time.copies = copy_seconds(settings, gpu, linear);
  time.forward_share = 2 * linear / (4 * linear + 2 * recomputed);
  time.optimizer =
      lora * (settings.optimizer_is_8bit ? 24.0 : 36.0) / bandwidth;  // values, gradients (cleared, normed, read), moments
  return time;
}

}  // namespace qlorapp
