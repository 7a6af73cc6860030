// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "../quantize_arguments.hpp"
#include "cuda/blockwise.hpp"
#include "cuda/quantize_4bit.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

/// The kernels lower it to the first block that holds NaN or infinity.
at::Tensor no_bad_block(const at::Tensor& like) {
  return at::full({1}, std::numeric_limits<int64_t>::max(), like.options().dtype(at::kLong));
}

/// Waits for the GPU: an error has to be raised by the call that finds it.
void check_finite(const char* op, const char* name, const at::Tensor& dense, int64_t block_size, const at::Tensor& bad_block) {
  const int64_t block = bad_block.item<int64_t>();
  if (block == std::numeric_limits<int64_t>::max()) return;
  const int64_t begin = block * block_size;
  const int64_t count = std::min(block_size, dense.numel() - begin);
  const at::Tensor values = dense.flatten().narrow(0, begin, count).to(at::kCPU, at::kFloat).contiguous();
  const float* const data = values.const_data_ptr<float>();
  const auto bad = std::find_if(data, data + count, [](float value) { return !std::isfinite(value); });
  C10_THROW_ERROR(ValueError, c10::str("[", op, "] ", name, " must be finite; got ", *bad, " at flat index ", begin + (bad - data),
                                       ". A checkpoint with such a value is damaged."));
}

Pair quantize_four_bits(const char* op, const at::Tensor& weight, int64_t block_size, std::string_view quant_type,
                        cuda::FourBitRounding rounding) {
  check_weight_dtype(op, "weight", weight.scalar_type());
  check_block_size(op, block_size);
  const gpu::Launch launch(weight);
  const at::Tensor dense = weight.contiguous();
  cuda::QuantizeFourBit work;
  work.quant_type = checked_code_book(op, quant_type);
  work.n = dense.numel();
  at::Tensor packed = at::empty({packed_bytes(work.n), 1}, dense.options().dtype(at::kByte));
  at::Tensor absmax = at::empty({block_count(work.n, block_size)}, dense.options().dtype(at::kFloat));
  if (work.n == 0) return {packed, absmax};
  work.weight = dense.const_data_ptr();
  work.type = gpu::float_type(op, dense);
  work.block_size = block_size;
  work.rounding = rounding;
  work.packed = packed.mutable_data_ptr<uint8_t>();
  work.absmax = absmax.mutable_data_ptr<float>();
  at::Tensor bad_block;
  if (rounding == cuda::FourBitRounding::kExact) {
    bad_block = no_bad_block(dense);
    work.first_bad_block = reinterpret_cast<unsigned long long*>(bad_block.mutable_data_ptr<int64_t>());
  }
  C10_CUDA_CHECK(cuda::quantize_4bit(work, launch.stream()));
  if (bad_block.defined()) check_finite(op, "weight", dense, block_size, bad_block);
  return {packed, absmax};
}

Pair quantize_4bit(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  return quantize_four_bits("quantize_4bit", weight, block_size, quant_type, cuda::FourBitRounding::kExact);
}
Pair quantize_4bit_bnb(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  return quantize_four_bits("quantize_4bit_bnb", weight, block_size, quant_type, cuda::FourBitRounding::kBnbCuda);
}

Pair quantize_eight_bits(const char* op, const at::Tensor& x, int64_t block_size, bool is_signed, cuda::DynamicCode rounding) {
  check_weight_dtype(op, "x", x.scalar_type());
  check_nested_block_size(op, "block_size", block_size);
  const gpu::Launch launch(x);
  const at::Tensor dense = x.to(at::kFloat).contiguous();
  cuda::QuantizeBlockwise work;
  work.n = dense.numel();
  at::Tensor codes = at::empty(x.sizes(), dense.options().dtype(at::kByte));
  at::Tensor absmax = at::empty({block_count(work.n, block_size)}, dense.options());
  if (work.n == 0) return {codes, absmax};
  work.x = dense.const_data_ptr<float>();
  work.block_size = block_size;
  work.is_signed = is_signed;
  work.rounding = rounding;
  work.codes = codes.mutable_data_ptr<uint8_t>();
  work.absmax = absmax.mutable_data_ptr<float>();
  at::Tensor bad_block;
  if (rounding == cuda::DynamicCode::kNearest) {
    bad_block = no_bad_block(dense);
    work.first_bad_block = reinterpret_cast<unsigned long long*>(bad_block.mutable_data_ptr<int64_t>());
  }
  C10_CUDA_CHECK(cuda::quantize_blockwise(work, launch.stream()));
  if (bad_block.defined()) check_finite(op, "x", dense, block_size, bad_block);
  return {codes, absmax};
}

Pair quantize_blockwise(const at::Tensor& x, int64_t block_size, bool is_signed) {
  return quantize_eight_bits("quantize_blockwise", x, block_size, is_signed, cuda::DynamicCode::kNearest);
}
Pair quantize_blockwise_bnb(const at::Tensor& x, int64_t block_size, bool is_signed) {
  return quantize_eight_bits("quantize_blockwise_bnb", x, block_size, is_signed, cuda::DynamicCode::kBnbCuda);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("quantize_4bit", quantize_4bit);
  m.impl("quantize_4bit_bnb", quantize_4bit_bnb);
  m.impl("quantize_blockwise", quantize_blockwise);
  m.impl("quantize_blockwise_bnb", quantize_blockwise_bnb);
}

}  // namespace qlorapp::ops
