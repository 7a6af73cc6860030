// SPDX-License-Identifier: Apache-2.0
#include "nn/block_weights.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.hpp"
#include "ops/device_memory.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kAlignment = 256;  // of the widest loads of a kernel, and of a copy engine

/// Hands out the tensors of a piece one behind the other. Without a buffer it only counts.
class Cutter {
 public:
  explicit Cutter(at::Tensor buffer = {}) : buffer_(std::move(buffer)) {}

  at::Tensor operator()(at::IntArrayRef shape, at::ScalarType dtype) {
    const int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(dtype)), at = end_;
    end_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return buffer_.defined() ? buffer_.narrow(0, at, bytes).view(dtype).view(shape) : at::Tensor();
  }
  [[nodiscard]] int64_t end() const { return end_; }

 private:
  at::Tensor buffer_;
  int64_t end_ = 0;
};

}  // namespace

WeightForm WeightForm::of(const FrozenWeight& weight) {
  if (!weight.quantized.defined()) return {weight.dense.sizes().vec(), weight.dense.scalar_type()};
  return {weight.quantized.shape, weight.quantized.dtype, Quantizer::like(weight.quantized).options()};
}

BlockForms forms_of(const BlockWeights& weights) {
  BlockForms forms;
  std::transform(weights.begin(), weights.end(), std::back_inserter(forms), &WeightForm::of);
  return forms;
}

FrozenWeight empty_weight(const WeightForm& form, const PlaceMaker& place) {
  if (form.four_bit) return FrozenWeight(empty_quantized(form.shape, form.dtype, *form.four_bit, place));
  return FrozenWeight(place(form.shape, form.dtype));
}

int64_t bytes_in_one_piece(const BlockForms& forms) {
  Cutter cutter;
  for (const WeightForm& form : forms) static_cast<void>(empty_weight(form, std::ref(cutter)));
  return cutter.end();
}

BlockWeights views_of(const at::Tensor& bytes, const BlockForms& forms) {
  Cutter cutter(bytes);
  BlockWeights weights;
  for (const WeightForm& form : forms) weights.push_back(empty_weight(form, std::ref(cutter)));
  return weights;
}

int64_t shard_bytes(const BlockForms& forms, int64_t ranks) {
  const int64_t step = ranks * kAlignment;
  return (bytes_in_one_piece(forms) + step - 1) / step * kAlignment;
}

BlockWeights shapes_of(const BlockForms& forms, at::Device device) {
  const int64_t bytes = bytes_in_one_piece(forms);
  // A plan counts what is made on Meta, and this is nothing.
  return views_of(device.is_meta() ? ops::empty_on_host({bytes}, at::kByte, device)
                                   : at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kMeta)),
                  forms);
}

void copy_weight(const FrozenWeight& to, const FrozenWeight& from) {
  const auto copy = [](const at::Tensor& target, const at::Tensor& source) {
    QLORAPP_CHECK_VALUE(target.defined() == source.defined() && (!target.defined() || target.sizes() == source.sizes()),
                        "[decoder_block] a weight in host memory can be replaced only by one of the same form.");
    if (!target.defined() || source.is_meta()) return;  // a plan's host memory does not exist
    target.copy_(source);
  };
  copy(to.dense, from.dense);
  copy(to.quantized.packed, from.quantized.packed);
  copy(to.quantized.absmax, from.quantized.absmax);
  copy(to.quantized.nested_absmax, from.quantized.nested_absmax);
  copy(to.quantized.nested_offset, from.quantized.nested_offset);
}

}  // namespace qlorapp
