// SPDX-License-Identifier: Apache-2.0
#include "nn/step_context.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace qlorapp {

RopeTable::RopeTable(at::Tensor inverse_frequencies, double attention_scale)
    : inverse_frequencies_(std::move(inverse_frequencies)), attention_scale_(attention_scale) {}

void RopeTable::reserve(int64_t length) {
  if (cos_.defined() && cos_.size(0) >= length) return;
  const int64_t grown = cos_.defined() ? std::max(length, cos_.size(0) * 2) : length;
  // transformers forms the angles as a float32 outer product and takes cos and sin in float32; so do we.
  const at::Tensor positions = at::arange(grown, inverse_frequencies_.options());
  const at::Tensor angles = at::outer(positions, inverse_frequencies_);
  cos_ = angles.cos();
  sin_ = angles.sin();
  if (attention_scale_ != 1.0) {
    cos_.mul_(attention_scale_);
    sin_.mul_(attention_scale_);
  }
}

}  // namespace qlorapp
