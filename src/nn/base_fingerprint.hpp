// SPDX-License-Identifier: Apache-2.0
/// Numbers that tell frozen bases apart, so that a run is never resumed on another one. Not cryptographic: they find mistakes, not attacks.
///
/// Every byte counts. A tensor's 64-bit words w[i] give the sum over i of mix(w[i] ^ i·K), modulo 2^64. mix is a bijection, so a change of
/// one word always changes the sum; changes of several go unnoticed once in 2^64. The order in which a device adds up does not matter.
#pragma once

#include <cstdint>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/quantized_tensor.hpp"

namespace qlorapp {

/// The sum over the bytes of one tensor. @param by_operators  as on a GPU, also on a CPU.
[[nodiscard]] uint64_t byte_sum(const at::Tensor& tensor, bool by_operators = false);

struct BaseFingerprint {
  uint64_t whole = 0;  ///< Of all frozen tensors and their shapes.
  /// Of the same without the scales. Those of double quantization go by a mean, whose last bit depends on how a device adds up: a model
  /// that was quantized while it was loaded on a GPU and on a CPU may differ in them, and in nothing else.
  uint64_t without_scales = 0;

  bool operator==(const BaseFingerprint&) const = default;
};

/// Synchronizes on a GPU, where it takes 64 MiB for a moment.
[[nodiscard]] BaseFingerprint base_fingerprint(const CausalLM& model);
/// Of the codes of the four-bit weights alone, and of scales that are not quantized.
[[nodiscard]] uint64_t four_bit_fingerprint(const Decoder& decoder);

/// The same of weights that are never in memory together: they come one by one, in the order of the model.
class FourBitFingerprint {
 public:
  void add(const QuantizedTensor& weight);
  [[nodiscard]] uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

}  // namespace qlorapp
