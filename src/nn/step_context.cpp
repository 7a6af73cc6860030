// SPDX-License-Identifier: Apache-2.0
#include "nn/step_context.hpp"

#include <ATen/ATen.h>

#include <algorithm>

namespace qlorapp {

RopeTables::RopeTables(const std::vector<format::RopeSettings>& ropes, at::Device device) : device_(device) {
  for (const format::RopeSettings& rope : ropes) tables_.push_back({rope, {}});
}

const std::vector<Rotation>& RopeTables::reserve(int64_t length) {
  last_.clear();
  for (Table& table : tables_) {
    const int64_t of = is_long_for(table.rope, length) ? length : 0,
                  there = table.rotation.cos.defined() ? table.rotation.cos.size(0) : 0;
    const bool same =
        of == table.length || (of > 0 && table.length > 0 && table.rope.type == format::RopeSettings::Type::kLongRope);
    if (there < length || !same)
      fill(table, of, there < length && there > 0 ? std::max(length, 2 * there) : std::max(length, there));
    last_.push_back(table.rotation);
    if (length <= table.rope.original_max_position_embeddings) last_.back().query_scale.reset();  // 1 for each
  }
  return last_;
}

void RopeTables::fill(Table& table, int64_t length, int64_t positions) const {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor frequencies = at::tensor(format::rope_inverse_frequencies(table.rope, length), options).to(device_);
  // transformers forms the angles as a float32 outer product and takes cos and sin in float32; so do we.
  const at::Tensor numbers = at::arange(positions, options.device(device_));
  const at::Tensor angles = at::outer(numbers, frequencies);
  at::Tensor cos = angles.cos(), sin = angles.sin();  // new ones: a batch that is under way keeps the old
  if (table.rope.attention_factor != 1.0) {
    cos.mul_(table.rope.attention_factor);
    sin.mul_(table.rope.attention_factor);
  }
  table.rotation = {cos, sin, {}};
  table.length = length;
  if (table.rope.query_beta != 0) {
    const at::Tensor turns = (numbers / static_cast<double>(table.rope.original_max_position_embeddings)).floor();
    table.rotation.query_scale = (turns + 1).log().mul(table.rope.query_beta) + 1;
  }
}

}  // namespace qlorapp
