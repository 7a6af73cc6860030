// SPDX-License-Identifier: Apache-2.0
#include "quant/arrival.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "ops/device_memory.hpp"
#include "quant/piece_quantizer.hpp"

namespace qlorapp {

Arrival arrive_dense(const at::Tensor& place, at::ScalarType stored, at::Device device) {
  if (place.scalar_type() == stored && place.device() == device) return {place, {}, {}};
  return {{},
          [flat = place.view({-1})](int64_t first, const at::Tensor& piece) {
            if (piece.is_meta() && !flat.is_meta()) return;  // a plan's; its host memory is not allocated
            flat.narrow(0, first, piece.numel()).copy_(piece);
          },
          {}};
}

Arrival arrive_quantized(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType stored,
                         const Quantizer& quantizer, std::function<void(QuantizedTensor)> done) {
  const auto pieces = std::make_shared<PieceQuantizer>(quantizer, shape, stored);
  const auto named = [name](const auto& work) {
    try {
      work();
    } catch (const Error& error) { throw FormatError(message("[load] tensor '{}' cannot be quantized: {}", name, error.what())); }
  };
  return {{},
          [pieces, named](int64_t first, const at::Tensor& piece) { named([&] { pieces->take(first, piece); }); },
          [pieces, named, done = std::move(done)] {
            QuantizedTensor weight;
            named([&] { weight = pieces->finish(); });
            done(std::move(weight));
          }};
}

PlaceMaker places_on(at::Device device) {
  return [device](at::IntArrayRef shape, at::ScalarType dtype) {
    return ops::empty_for_weight(shape, at::TensorOptions().dtype(dtype).device(device));
  };
}

QuantizedTensor empty_quantized(const std::vector<int64_t>& shape, at::ScalarType dtype, const Quantizer::Options& options,
                                at::Device device) {
  return empty_quantized(shape, dtype, options, places_on(device));
}

QuantizedTensor empty_quantized(const std::vector<int64_t>& shape, at::ScalarType dtype, const Quantizer::Options& options,
                                const PlaceMaker& place) {
  QuantizedTensor weight;
  weight.shape = shape;
  weight.dtype = dtype;
  weight.block_size = options.block_size;
  weight.nested_block_size = options.nested_block_size;
  weight.quant_type = options.quant_type;
  const int64_t blocks = scale_count(weight.quant_type, weight.numel(), options.block_size);
  weight.packed = place({packed_bytes(weight.quant_type, weight.numel()), 1}, at::kByte);
  weight.absmax = place({blocks}, options.double_quant ? at::kByte : at::kFloat);
  if (options.double_quant) {
    weight.nested_absmax = place({block_count(blocks, options.nested_block_size)}, at::kFloat);
    weight.nested_offset = place({}, at::kFloat);
  }
  return weight;
}

StreamBuffers StreamBuffers::of(at::DeviceType type, int torch_threads) {
  if (type == at::kCPU) return {torch_threads, torch_threads, int64_t{1} << 20};
  return {std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8), 24, int64_t{8} << 20};
}

}  // namespace qlorapp
