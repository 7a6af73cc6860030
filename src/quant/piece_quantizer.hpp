// SPDX-License-Identifier: Apache-2.0
/// A weight that arrives in pieces becomes a QuantizedTensor without ever being in memory as a whole.
///
/// Blocks are independent, so a piece of whole blocks is quantized alone; the scales' own quantization (mean and nested blocks)
/// waits for the last piece. The result is that of Quantizer::quantize on the whole weight, bit for bit.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

class PieceQuantizer {
 public:
  /// @param shape, dtype  of the whole weight. Memory is taken with the first piece.
  PieceQuantizer(const Quantizer& quantizer, std::vector<int64_t> shape, at::ScalarType dtype);

  /// Elements of the flattened weight from `first` on; in any order, each once. All on one device, which becomes that of the
  /// result.
  /// @param piece  flat, in the weight's dtype; begins at a multiple of block_size and ends at one, or at the weight's end.
  /// @throws ValueError naming the first element that is not finite by its index in the whole weight (Compat::kNone).
  ///         Synchronizes for that check.
  void take(int64_t first, const at::Tensor& piece);
  /// After the last piece.
  [[nodiscard]] QuantizedTensor finish();

 private:
  Quantizer quantizer_;
  QuantizedTensor weight_;
  std::once_flag allocated_;
};

}  // namespace qlorapp
