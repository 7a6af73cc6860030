// SPDX-License-Identifier: Apache-2.0
#include "rehearse_load.hpp"
#include "nn/decoder.hpp"
#include "ops/memory_tape.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "nn/arriving_weights.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "quant/arrival.hpp"

namespace qlorapp {
namespace {

using ops::MemoryTape;
using ops::MemoryUse;

/// What PyTorch gives cuBLAS on first use, and keeps: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize().
int64_t cublas_workspace(int64_t architecture) {
  // ":KiB:count:KiB:count". Deterministic runs set it (transformers' enable_full_determinism: ":16:8").
  if (const char* const pairs = std::getenv("CUBLAS_WORKSPACE_CONFIG")) {
    static const std::regex pair(":([0-9]{1,9}):([0-9]{1,5})");
    int64_t total = 0;
    for (std::cregex_iterator found(pairs, pairs + std::strlen(pairs), pair), end; found != end; ++found)
      total += std::stoll((*found)[1]) * std::stoll((*found)[2]) << 10;
    if (total > 0) return total;
  }
  const int64_t major = architecture / 10;
  return major == 9 || major == 10 ? int64_t{32} << 20 : (2 * int64_t{4096} + 8 * 16) << 10;
}

struct Expected {
  std::string name;
  int64_t bytes = 0;
  Arrival arrival;
};

/// In pieces of a buffer's size, as io/tensor_stream.cpp brings them, one after the other. The order is that of names, in which
/// checkpoints are written. Where several threads of a CPU quantize, each thread's temporary memory is not all counted: 0.3 MiB per thread.
void stream(std::vector<Expected> tensors, at::ScalarType stored, const ops::PlannedDevice& device) {
  std::sort(tensors.begin(), tensors.end(), [](const Expected& a, const Expected& b) { return a.name < b.name; });
  const StreamBuffers buffers = StreamBuffers::of(device.type, static_cast<int>(device.threads));
  const auto element = static_cast<int64_t>(c10::elementSize(stored));
  int64_t count = buffers.on_device(device.type);
  if (device.type == at::kCPU) {
    int64_t pieces = 0;
    for (const Expected& tensor : tensors) pieces += (tensor.bytes + buffers.buffer_bytes - 1) / buffers.buffer_bytes;
    count = std::min(count, pieces);
  }
  std::vector<at::Tensor> staging;
  {
    const ops::MemoryUseScope use(MemoryUse::kLoading);
    for (int64_t i = 0; i < count; ++i)
      staging.push_back(at::empty({buffers.buffer_bytes / element}, at::TensorOptions().dtype(stored).device(kNowhere)));
  }
  for (Expected& tensor : tensors) {
    for (int64_t offset = 0; offset < tensor.bytes && tensor.arrival.take; offset += buffers.buffer_bytes) {
      const int64_t bytes = std::min(buffers.buffer_bytes, tensor.bytes - offset);
      tensor.arrival.take(offset / element, staging.front().narrow(0, 0, bytes / element));
    }
    if (tensor.arrival.done) tensor.arrival.done();
    tensor = {};
  }
}

void label(MemoryTape& tape, const DecoderWeights& weights) {
  for (const at::Tensor* dense : {&weights.embed_tokens, &weights.lm_head, &weights.norm}) tape.label(*dense, MemoryUse::kDense);
  for (const DecoderBlock::Weights& block : weights.blocks) {
    for (const at::Tensor& norm : block.dense) tape.label(norm, MemoryUse::kDense);
    for (const FrozenWeight& weight : block.projections) {
      tape.label(weight.dense, MemoryUse::kDense);
      tape.label(weight.quantized.packed, MemoryUse::kCodes);
      for (const at::Tensor* scales : {&weight.quantized.absmax, &weight.quantized.nested_absmax, &weight.quantized.nested_offset})
        tape.label(*scales, MemoryUse::kScales);
    }
  }
}

}  // namespace

at::ScalarType stored_dtype(const format::ModelConfig& config) {
  if (!config.blocks.empty()) return at::kFloat;  // what a GGUF file's other weights are read in
  switch (config.dtype.value_or(format::Dtype::kBF16)) {
    case format::Dtype::kF32:
      return at::kFloat;
    case format::Dtype::kF16:
      return at::kHalf;
    default:
      return at::kBFloat16;
  }
}

bool was_skipped(const format::ModelConfig& config, const std::string& weight) {
  const auto& names = config.quantization->skip_modules;
  return names && std::any_of(names->begin(), names->end(), [&](const std::string& name) {
           return weight == name + ".weight" || weight.ends_with("." + name + ".weight") || weight.starts_with(name + ".") ||
                  weight.find("." + name + ".") != std::string::npos;
         });
}

Quantizer::Options options_as_stored(const PlanSettings& settings) {
  Quantizer::Options options = settings.quantization;
  options.quant_type = settings.model.quantization->quant_type;
  options.double_quant = settings.model.quantization->double_quant;
  return options;
}

at::Tensor rehearse_library(const ops::PlannedDevice& device, MemoryTape& tape) {
  if (device.type != at::kCUDA) return {};
  at::Tensor library = at::empty({cublas_workspace(device.architecture)}, at::TensorOptions().dtype(at::kByte).device(kNowhere));
  tape.label(library, MemoryUse::kLibrary);
  return library;
}

CausalLM rehearse_load(const PlanSettings& settings, MemoryTape& tape) {
  const at::ScalarType stored = stored_dtype(settings.model);
  std::vector<Expected> tensors;
  StoredWeights source;
  source.dtype = [&](const std::string&, const std::vector<int64_t>&) { return stored; };
  source.four_bit_form = [&](const std::string& name, const std::vector<int64_t>& shape) {
    const auto blocks = settings.model.blocks.find(name);
    if (settings.keep_blocks && blocks != settings.model.blocks.end())
      return std::optional(WeightForm::of_blocks(shape, blocks->second));
    const bool is_quantized = settings.model.quantization.has_value() && !was_skipped(settings.model, name);
    return is_quantized ? std::optional(WeightForm{shape, stored, options_as_stored(settings)}) : std::nullopt;
  };
  source.bring_quantized = [&](const std::string& name, const QuantizedTensor& places) {
    tensors.push_back({name, static_cast<int64_t>(places.packed.nbytes()), {places.packed, {}, {}}});
    tensors.push_back({name + ".absmax", static_cast<int64_t>(places.absmax.nbytes()), {places.absmax, {}, {}}});
  };
  source.bring = [&](const std::string& name, const std::vector<int64_t>& shape, Arrival arrival) {
    const int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(stored));
    tensors.push_back({name, bytes, std::move(arrival)});
  };
  DecoderWeights weights = arrange_weights(
      settings.model,
      {settings.compute_dtype, settings.load_in_4bit, settings.quantization, settings.keep_blocks, settings.skip_modules, kNowhere,
       settings.memory.embedding_on_host, settings.memory.base_on_host, planned_ranks(settings.base_shards)},
      source);
  stream(std::move(tensors), stored, settings.device);
  keep_own_shards(weights, settings.model);
  label(tape, weights);
  return {settings.model, std::move(weights)};
}

}  // namespace qlorapp
