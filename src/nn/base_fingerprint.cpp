// SPDX-License-Identifier: Apache-2.0
#include "nn/base_fingerprint.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include "nn/decoder.hpp"

namespace qlorapp {

/// FNV-1a over 64-bit words in four interleaved lanes: the multiplications of one lane hide behind those of the others.
class FourBitFingerprint::Hash {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (const int64_t extent : tensor.sizes()) word(static_cast<uint64_t>(extent));
    at::Tensor flat = tensor.detach().reshape({-1});
    if (flat.nbytes() > kWhole) flat = flat.slice(0, 0, flat.numel(), kStride);
    const at::Tensor plain = flat.contiguous().cpu();
    const auto* bytes = static_cast<const unsigned char*>(plain.const_data_ptr());
    const size_t size = plain.nbytes(), whole = size / 32 * 32;
    for (size_t at = 0; at < whole; at += 32) {
      uint64_t words[4];
      std::memcpy(words, bytes + at, 32);
      for (size_t i = 0; i < 4; ++i) lanes_[i] = (lanes_[i] ^ words[i]) * kPrime;
    }
    uint64_t tail[4] = {0, 0, 0, 0};
    if (size > whole) std::memcpy(tail, bytes + whole, size - whole);
    for (const uint64_t value : tail) word(value);
  }
  void word(uint64_t value) { lanes_[0] = (lanes_[0] ^ value) * kPrime; }
  [[nodiscard]] uint64_t value() const {
    uint64_t result = 0;
    for (const uint64_t lane : lanes_) result = (result ^ lane ^ (lane >> 29)) * kPrime;
    return result;
  }

 private:
  static constexpr uint64_t kPrime = 1099511628211ULL;
  static constexpr size_t kWhole = size_t{1} << 20;  // the scales of all but the largest weights
  static constexpr int64_t kStride = 61;             // prime, so that it visits every column
  uint64_t lanes_[4] = {14695981039346656037ULL, 1469598103934665603ULL, 2166136261ULL, 16777619ULL};
};

FourBitFingerprint::FourBitFingerprint() : hash_(std::make_unique<Hash>()) {}
FourBitFingerprint::~FourBitFingerprint() = default;

void FourBitFingerprint::add(const QuantizedTensor& weight) {
  hash_->add(weight.packed);
  // Scales in eight bits go by the mean of a weight's scales, whose last bit depends on how a device adds up.
  if (!weight.double_quantized()) hash_->add(weight.absmax);
  for (const int64_t number : {weight.block_size, static_cast<int64_t>(weight.quant_type), int64_t{weight.double_quantized()}}) {
    hash_->word(static_cast<uint64_t>(number));
  }
}

uint64_t FourBitFingerprint::value() const { return hash_->value(); }

uint64_t base_fingerprint(const CausalLM& model) {
  FourBitFingerprint fingerprint;
  FourBitFingerprint::Hash& hash = *fingerprint.hash_;
  hash.add(model.decoder().embed_tokens());
  if (!model.decoder().lm_head().is_alias_of(model.decoder().embed_tokens())) hash.add(model.decoder().lm_head());
  hash.add(model.decoder().norm_weight());
  for (const DecoderBlock& block : model.blocks()) {
    hash.add(block.weights().input_norm);
    hash.add(block.weights().post_attention_norm);
    for (const FrozenWeight& weight : block.weights().projections) {
      hash.add(weight.dense);
      if (weight.quantized.defined()) fingerprint.add(weight.quantized);
    }
  }
  return fingerprint.value();
}

uint64_t four_bit_fingerprint(const CausalLM& model) {
  FourBitFingerprint fingerprint;
  for (const DecoderBlock& block : model.blocks()) {
    for (const FrozenWeight& weight : block.weights().projections) {
      if (weight.quantized.defined()) fingerprint.add(weight.quantized);
    }
  }
  return fingerprint.value();
}

}  // namespace qlorapp
