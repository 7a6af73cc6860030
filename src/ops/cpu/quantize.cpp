// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cmath>
#include <string_view>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../device_memory.hpp"
#include "../quantize_arguments.hpp"
#include "format/double_quant.hpp"
#include "quantize_4bit_kernel.hpp"

namespace qlorapp::ops {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

/// Elements that are worth a thread.
constexpr int64_t kQuantizeGrain = int64_t{1} << 14;

void lower_to(std::atomic<int64_t>& smallest, int64_t value) {
  int64_t known = smallest.load();
  while (value < known && !smallest.compare_exchange_weak(known, value)) {}
}

/// @param block  holds an element that is not finite, and is the first to do so.
[[noreturn]] void refuse_not_finite(const char* op, const char* name, const at::Tensor& dense, int64_t block, int64_t block_size) {
  const int64_t begin = block * block_size;
  const int64_t count = std::min(block_size, dense.numel() - begin);
  const at::Tensor values = dense.flatten().narrow(0, begin, count).to(at::kFloat).contiguous();
  const float* const data = values.const_data_ptr<float>();
  const auto bad = std::find_if(data, data + count, [](float value) { return !std::isfinite(value); });
  C10_THROW_ERROR(ValueError, c10::str("[", op, "] ", name, " must be finite; got ", *bad, " at flat index ", begin + (bad - data),
                                       ". A checkpoint with such a value is damaged."));
}

cpu::WeightType weight_type_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return cpu::WeightType::kFloat16;
  return dtype == at::kBFloat16 ? cpu::WeightType::kBFloat16 : cpu::WeightType::kFloat32;
}

Pair quantize_four_bits(const char* op, const at::Tensor& weight, int64_t block_size, std::string_view quant_type, bool bnb_edges) {
  check_weight_dtype(op, "weight", weight.scalar_type());
  check_block_size(op, block_size);
  const at::Tensor dense = weight.contiguous();
  const int64_t n = dense.numel();
  const int64_t blocks = block_count(n, block_size);
  at::Tensor packed = empty_for_weight({packed_bytes(n), 1}, dense.options().dtype(at::kByte));
  at::Tensor absmax = at::empty({blocks}, dense.options().dtype(at::kFloat));

  cpu::Quantize4bit work;
  work.quant_type = checked_code_book(op, quant_type);
  work.weight = dense.const_data_ptr();
  work.weight_type = weight_type_of(dense.scalar_type());
  work.n = n;
  work.block_size = block_size;
  work.bnb_edges = bnb_edges;
  work.packed = packed.mutable_data_ptr<uint8_t>();
  work.absmax = absmax.mutable_data_ptr<float>();
  const auto kernel = cpu::quantize_4bit_kernel(cpu_isa());
  std::atomic<int64_t> first_bad{blocks};
  at::parallel_for(0, blocks, std::max<int64_t>(kQuantizeGrain / block_size, 1), [&](int64_t begin, int64_t end) {
    const int64_t bad = kernel(work, begin, end);
    if (bad >= 0) lower_to(first_bad, bad);
  });
  if (first_bad < blocks) refuse_not_finite(op, "weight", dense, first_bad, block_size);
  return {packed, absmax};
}

Pair quantize_4bit(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  return quantize_four_bits("quantize_4bit", weight, block_size, quant_type, /*bnb_edges=*/false);
}
Pair quantize_4bit_bnb(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  return quantize_four_bits("quantize_4bit_bnb", weight, block_size, quant_type, /*bnb_edges=*/true);
}

Pair quantize_eight_bits(const char* op, const at::Tensor& x, int64_t block_size, bool is_signed, DynamicRounding rounding) {
  check_weight_dtype(op, "x", x.scalar_type());
  check_nested_block_size(op, "block_size", block_size);
  const at::Tensor dense = x.to(at::kFloat).contiguous();
  const int64_t n = dense.numel();
  const int64_t blocks = block_count(n, block_size);
  at::Tensor codes = at::empty(x.sizes(), dense.options().dtype(at::kByte));
  at::Tensor absmax = at::empty({blocks}, dense.options());
  const float* const in = dense.const_data_ptr<float>();
  auto* const out = codes.mutable_data_ptr<uint8_t>();
  auto* const scales = absmax.mutable_data_ptr<float>();
  std::atomic<int64_t> first_bad{blocks};
  at::parallel_for(0, blocks, std::max<int64_t>(kQuantizeGrain / 4 / block_size, 1), [&](int64_t begin, int64_t end) {
    if (rounding == DynamicRounding::kNearest) {
      const float* const stop = in + std::min(end * block_size, n);
      const auto bad = std::find_if(in + begin * block_size, stop, [](float value) { return !std::isfinite(value); });
      if (bad != stop) return lower_to(first_bad, (bad - in) / block_size);
    }
    encode_dynamic(rounding, is_signed, in, n, block_size, begin, end, out, scales);
  });
  if (first_bad < blocks) refuse_not_finite(op, "x", dense, first_bad, block_size);
  return {codes, absmax};
}

Pair quantize_blockwise(const at::Tensor& x, int64_t block_size, bool is_signed) {
  return quantize_eight_bits("quantize_blockwise", x, block_size, is_signed, DynamicRounding::kNearest);
}
Pair quantize_blockwise_bnb(const at::Tensor& x, int64_t block_size, bool is_signed) {
  return quantize_eight_bits("quantize_blockwise_bnb", x, block_size, is_signed, DynamicRounding::kBnbCpu);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("quantize_4bit", quantize_4bit);
  m.impl("quantize_4bit_bnb", quantize_4bit_bnb);
  m.impl("quantize_blockwise", quantize_blockwise);
  m.impl("quantize_blockwise_bnb", quantize_blockwise_bnb);
}

}  // namespace qlorapp::ops
