// SPDX-License-Identifier: Apache-2.0
/// Weights to four bits and back: the first of the library's classes, usable alone.
///
///     const Quantizer quantizer;                               // NF4, blocks of 64, double quantization: what QLoRA trains on
///     const QuantizedTensor q = quantizer.quantize(weight);    // 4.127 bits an element
///     const at::Tensor back = quantizer.dequantize(q);         // in the dtype of weight
///
/// Rules and layout are in format/nf4.hpp and format/double_quant.hpp. Codes and absmax equal those of bitsandbytes' build for
/// the same device; Compat chooses the rule where that build's is unsound. Stateless after construction, so one Quantizer
/// may serve many threads. Deterministic; the offset of double quantization is at::mean of the scales, whose last bit depends
/// on the number of threads (as the peer's does).
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "qlorapp/quant/quantized_tensor.hpp"

namespace qlorapp {

/// Behavior where bitsandbytes' own is unsound.
enum class Compat : uint8_t {
  kNone,  ///< Nested codes are exactly nearest, a block of zeros has code 7 and absmax 0, NaN and infinity are refused.
  /// As bitsandbytes: its nested codes, and its results for NaN, infinity and a short last block of zeros.
  kBnb,
};

class Quantizer {
 public:
  struct Options {
    QuantType quant_type = QuantType::kNf4;
    int64_t block_size = kDefaultBlockSize;  ///< Elements a scale: 32, 64, 128, … 4096.
    bool double_quant = true;                ///< Store the scales in eight bits: 4.127 instead of 4.5 bits an element.
    int64_t nested_block_size = 256;         ///< Scales a second-level scale; above 0.
    Compat compat = Compat::kNone;

    friend bool operator==(const Options&, const Options&) = default;
  };

  Quantizer() = default;
  /// @throws ValueError  naming the option, if one is outside its range above.
  explicit Quantizer(const Options& options);

  /// The Quantizer that makes more tensors of q's kind.
  [[nodiscard]] static Quantizer like(const QuantizedTensor& q, Compat compat = Compat::kNone);

  [[nodiscard]] const Options& options() const { return options_; }

  /// @param weight  any shape and strides; float32, float16 or bfloat16; finite. Not changed.
  /// @throws ValueError  naming the first element that is not finite (kNone; synchronizes). ValueError if it is undefined.
  [[nodiscard]] QuantizedTensor quantize(const at::Tensor& weight) const;

  /// @param dtype  float32, float16, bfloat16 or float64; by default that of the weight that was quantized.
  /// @returns a dense tensor of q.shape on q's device. Looks at q only. Does not synchronize. @throws ValueError if q is empty.
  [[nodiscard]] at::Tensor dequantize(const QuantizedTensor& q, std::optional<at::ScalarType> dtype = std::nullopt) const;

 private:
  Options options_;
};

}  // namespace qlorapp
