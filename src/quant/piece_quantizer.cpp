// SPDX-License-Identifier: Apache-2.0
#include "quant/piece_quantizer.hpp"

#include <ATen/ATen.h>

#include <tuple>
#include <utility>

#include "core/check.hpp"
#include "nest_scales.hpp"
#include "ops/device_memory.hpp"
#include "ops/quantize.hpp"

namespace qlorapp {
namespace {

/// The operator knows the index in the piece only.
[[noreturn]] void refuse_not_finite(const at::Tensor& piece, int64_t first) {
  const int64_t index = piece.isfinite().logical_not().nonzero()[0].item<int64_t>();
  throw ValueError(
      message("[quantize_4bit] weight must be finite; got {} at flat index {}. A checkpoint with such a value is damaged.",
              piece[index].item<float>(), first + index));
}

}  // namespace

PieceQuantizer::PieceQuantizer(const Quantizer& quantizer, std::vector<int64_t> shape, at::ScalarType dtype)
    : quantizer_(quantizer) {
  const Quantizer::Options& options = quantizer.options();
  weight_.shape = std::move(shape);
  weight_.dtype = dtype;
  weight_.block_size = options.block_size;
  weight_.nested_block_size = options.nested_block_size;
  weight_.quant_type = options.quant_type;
}

void PieceQuantizer::take(int64_t first, const at::Tensor& piece) {
  const int64_t n = weight_.numel(), block = weight_.block_size;
  QLORAPP_CHECK_VALUE(
      first % block == 0 && (piece.numel() % block == 0 || first + piece.numel() == n) && first + piece.numel() <= n,
      "[PieceQuantizer] a piece must be whole blocks of {} of a weight of {} elements; got {} elements from {} on.", block, n,
      piece.numel(), first);
  const Quantizer::Options& options = quantizer_.options();
  at::Tensor packed, absmax;
  try {
    std::tie(packed, absmax) = options.compat == Compat::kBnb ? ops::quantize_4bit_bnb(piece, block, options.quant_type)
                                                              : ops::quantize_4bit(piece, block, options.quant_type);
  } catch (const ValueError&) {
    if (first == 0 || piece.isfinite().all().item<bool>()) throw;
    refuse_not_finite(piece, first);
  }
  if (piece.numel() == n) {
    weight_.packed = std::move(packed);
    weight_.absmax = std::move(absmax);
    return;
  }
  std::call_once(allocated_, [&] {
    weight_.packed = ops::empty_for_weight({packed_bytes(n), 1}, packed.options());
    weight_.absmax = at::empty({block_count(n, block)}, absmax.options());
  });
  weight_.packed.narrow(0, first / 2, packed.numel()).copy_(packed);
  weight_.absmax.narrow(0, first / block, absmax.numel()).copy_(absmax);
}

QuantizedTensor PieceQuantizer::finish() {
  QLORAPP_CHECK_VALUE(weight_.packed.defined(), "[PieceQuantizer] finish() comes after the last piece; there was none.");
  nest_scales(weight_, quantizer_.options());
  return std::move(weight_);
}

}  // namespace qlorapp
