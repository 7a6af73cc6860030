// SPDX-License-Identifier: Apache-2.0
#include "nn/base_fingerprint.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "core/mix.hpp"
#include "nn/decoder.hpp"

namespace qlorapp {
namespace {

uint64_t host_sum(const at::Tensor& bytes) {
  const auto* const begin = bytes.const_data_ptr<uint8_t>();
  return at::parallel_reduce(
      0, bytes.numel() / 8, int64_t{1} << 16, uint64_t{0},
      [&](int64_t first, int64_t last, uint64_t sum) {
        for (int64_t i = first; i < last; ++i) {
          uint64_t word = 0;
          std::memcpy(&word, begin + i * 8, 8);
          sum += mixed(word ^ (static_cast<uint64_t>(i) * kMixPosition));
        }
        return sum;
      },
      std::plus<>());
}

/// words ^= words >> bits, as of unsigned words.
void fold_down_(at::Tensor& words, int64_t bits) {
  words.bitwise_xor_(at::bitwise_right_shift(words, bits).bitwise_and_((int64_t{1} << (64 - bits)) - 1));
}

/// The same by torch's operators, whose integers are signed and wrap around.
uint64_t device_sum(const at::Tensor& bytes) {
  constexpr int64_t kChunk = int64_t{1} << 22;  // words
  const at::Tensor words = bytes.view(at::kLong);
  const at::Tensor positions =
      at::arange(std::min(kChunk, words.numel()), words.options()).mul_(static_cast<int64_t>(kMixPosition));
  at::Tensor sum = at::zeros({}, words.options());
  for (int64_t at = 0; at < words.numel(); at += kChunk) {
    const int64_t count = std::min(kChunk, words.numel() - at);
    at::Tensor chunk = positions.narrow(0, 0, count) + static_cast<int64_t>(static_cast<uint64_t>(at) * kMixPosition);
    chunk.bitwise_xor_(words.narrow(0, at, count));
    fold_down_(chunk, 30);
    chunk.mul_(static_cast<int64_t>(kMixFirst));
    fold_down_(chunk, 27);
    chunk.mul_(static_cast<int64_t>(kMixSecond));
    fold_down_(chunk, 31);
    sum += chunk.sum();
  }
  return static_cast<uint64_t>(sum.item<int64_t>());
}

}  // namespace

uint64_t byte_sum(const at::Tensor& tensor, bool by_operators) {
  at::Tensor bytes = tensor.detach().contiguous().reshape({-1}).view(at::kByte);
  if (bytes.storage_offset() % 8 != 0) bytes = bytes.clone();
  const int64_t whole = bytes.numel() / 8 * 8;
  uint64_t tail = 0;
  if (whole < bytes.numel()) {
    const at::Tensor rest = bytes.narrow(0, whole, bytes.numel() - whole).cpu();
    std::memcpy(&tail, rest.const_data_ptr<uint8_t>(), static_cast<size_t>(rest.numel()));
  }
  const at::Tensor words = bytes.narrow(0, 0, whole);
  const uint64_t sum = whole == 0 ? 0 : words.is_cpu() && !by_operators ? host_sum(words) : device_sum(words);
  return sum + mixed(tail ^ (static_cast<uint64_t>(whole / 8) * kMixPosition));
}

namespace {

/// Order counts from tensor to tensor.
void fold(uint64_t& value, uint64_t next) { value = mixed(value + kMixPosition) ^ mixed(next); }

void fold(uint64_t& value, const at::Tensor& tensor) {
  if (!tensor.defined()) return fold(value, uint64_t{0});
  for (const int64_t extent : tensor.sizes()) fold(value, static_cast<uint64_t>(extent));
  fold(value, byte_sum(tensor));
}

void fold_layout(uint64_t& value, const QuantizedTensor& weight) {
  for (const int64_t number : {weight.block_size, static_cast<int64_t>(weight.quant_type), int64_t{weight.double_quantized()}})
    fold(value, static_cast<uint64_t>(number));
}

}  // namespace

void FourBitFingerprint::add(const QuantizedTensor& weight) {
  fold(value_, weight.packed);
  if (!weight.double_quantized()) fold(value_, weight.absmax);
  fold_layout(value_, weight);
}

BaseFingerprint base_fingerprint(const CausalLM& model) {
  BaseFingerprint result;
  const auto add = [&](const at::Tensor& tensor) {
    uint64_t one = 0;
    fold(one, tensor);
    fold(result.whole, one);
    fold(result.without_scales, one);
  };
  add(model.decoder().embed_tokens());
  if (!model.config().tie_word_embeddings) add(model.decoder().lm_head());
  add(model.decoder().norm_weight());
  for (const DecoderBlock& block : model.blocks()) {
    for (const at::Tensor& norm : block.weights().dense) add(norm);
    for (const FrozenWeight& weight : model.decoder().projections(block.index())) {
      add(weight.dense);
      if (!weight.quantized.defined()) continue;
      add(weight.quantized.packed);
      fold_layout(result.without_scales, weight.quantized);
      fold_layout(result.whole, weight.quantized);
      for (const at::Tensor* scales : {&weight.quantized.absmax, &weight.quantized.nested_absmax, &weight.quantized.nested_offset})
        fold(result.whole, *scales);
    }
  }
  return result;
}

uint64_t four_bit_fingerprint(const Decoder& decoder) {
  FourBitFingerprint fingerprint;
  for (const DecoderBlock& block : decoder.blocks()) {
    for (const FrozenWeight& weight : decoder.projections(block.index())) {
      if (weight.quantized.defined()) fingerprint.add(weight.quantized);
    }
  }
  return fingerprint.value();
}

}  // namespace qlorapp
