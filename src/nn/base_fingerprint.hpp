// SPDX-License-Identifier: Apache-2.0
/// A number that tells frozen bases apart, so that a run is never resumed on another one.
#pragma once

#include <cstdint>
#include <memory>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/quantized_tensor.hpp"

namespace qlorapp {

/// 64 bits over the frozen weights and their shapes: codes and dense tensors, of up to 1 MiB whole and
/// of larger ones each 61st byte or number, so that a run on 8B weights begins without reading 5 GB back from a GPU. The same
/// on every device. Not cryptographic: it finds mistakes, not attacks. On a GPU it synchronizes.
[[nodiscard]] uint64_t base_fingerprint(const CausalLM& model);
/// The same over the four-bit weights alone, whatever the precision of the rest.
[[nodiscard]] uint64_t four_bit_fingerprint(const CausalLM& model);

/// The same of weights that are never in memory together: they come one by one, in the order of the model.
class FourBitFingerprint {
 public:
  FourBitFingerprint();
  ~FourBitFingerprint();
  FourBitFingerprint(const FourBitFingerprint&) = delete;
  FourBitFingerprint& operator=(const FourBitFingerprint&) = delete;
  void add(const QuantizedTensor& weight);
  [[nodiscard]] uint64_t value() const;

 private:
  class Hash;
  std::unique_ptr<Hash> hash_;
  friend uint64_t base_fingerprint(const CausalLM& model);
};

}  // namespace qlorapp
