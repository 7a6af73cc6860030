// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <span>

#include "dequantize_4bit_kernel.hpp"
#include "dequantize_4bit_loop.hpp"
#include "format/ggml_blocks.hpp"

namespace qlorapp::ops::cpu {
namespace {

constexpr int64_t kAtOnce = 1024;  // a whole number of every block

template <Via via, class Out>
void convert(const float* from, int64_t count, Out* into) {
  for (int64_t i = 0; i < count; ++i) round_to(pass<via>(from[i]), into[i]);
}

/// Rows are whole blocks, so the flattened weight is, too.
template <class Use>
void for_values(const Dequantize4bit& work, int64_t begin, int64_t end, Use&& use) {
  const int64_t elements = block_elements(work.quant_type), bytes = block_bytes(work.quant_type);
  std::array<float, kAtOnce> values;
  for (int64_t first = begin / elements * elements; first < end; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, (end - first + elements - 1) / elements * elements);
    const auto* const from = reinterpret_cast<const std::byte*>(work.packed + first / elements * bytes);
    format::dequantize_row(format::gguf_type_of(work.quant_type), {from, static_cast<size_t>(count / elements * bytes)},
                           {values.data(), static_cast<size_t>(count)});
    const int64_t from_element = std::max(begin, first), to_element = std::min(end, first + count);
    use(values.data() + (from_element - first), to_element - from_element, from_element - begin);
  }
}

}  // namespace

void dequantize_blocks(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense) {
  for_values(work, begin, end, [&](const float* from, int64_t count, int64_t at) {
    switch (work.dense_type) {
      case DenseType::kFloat32:
        return convert<Via::kNothing>(from, count, static_cast<float*>(dense) + at);
      case DenseType::kFloat16:
        return convert<Via::kNothing>(from, count, static_cast<Float16*>(dense) + at);
      case DenseType::kBFloat16:
        return convert<Via::kNothing>(from, count, static_cast<BFloat16*>(dense) + at);
      case DenseType::kFloat32ViaFloat16:
        return convert<Via::kFloat16>(from, count, static_cast<float*>(dense) + at);
      case DenseType::kFloat32ViaBFloat16:
        return convert<Via::kBFloat16>(from, count, static_cast<float*>(dense) + at);
      case DenseType::kFloat64:
        return convert<Via::kNothing>(from, count, static_cast<double*>(dense) + at);
    }
  });
}

}  // namespace qlorapp::ops::cpu
