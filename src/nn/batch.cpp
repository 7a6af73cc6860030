// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/batch.hpp"

#include <ATen/ATen.h>

#include "core/check.hpp"

namespace qlorapp {

Batch Batch::of_equal_rows(const at::Tensor& tokens) {
  QLORAPP_CHECK_VALUE(tokens.dim() == 2 && tokens.scalar_type() == at::kLong && tokens.size(0) >= 1 && tokens.size(1) >= 2,
                      "[batch] tokens must be (R, L) int64 with R >= 1 and L >= 2; got {} {}.", c10::toString(tokens.scalar_type()),
                      joined(tokens.sizes()));
  const int64_t rows = tokens.size(0), length = tokens.size(1);
  at::Tensor targets = at::full_like(tokens, kIgnoredTarget);
  targets.narrow(1, 0, length - 1).copy_(tokens.narrow(1, 1, length - 1));
  Batch batch;
  batch.tokens = tokens.reshape({-1});
  batch.targets = targets.view({-1});
  batch.positions = at::arange(length, tokens.options()).repeat({rows});
  for (int64_t row = 0; row <= rows; ++row) batch.row_starts.push_back(row * length);
  batch.target_count = rows * (length - 1);
  return batch;
}

Batch Batch::filler(int64_t token) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong);
  Batch batch;
  batch.tokens = at::full({1}, token, options);
  batch.targets = at::full({1}, kIgnoredTarget, options);
  batch.positions = at::zeros({1}, options);
  batch.row_starts = {0, 1};
  batch.is_filler = true;
  return batch;
}

Batch Batch::rows(int64_t first, int64_t last) const {
  QLORAPP_CHECK_VALUE(first >= 0 && first < last && last <= row_count(), "[batch] rows must be some of 0 to {}; got {} to {}.",
                      row_count(), first, last);
  Batch out = *this;
  if (first == 0 && last == row_count()) return out;
  const auto begin = row_starts.begin() + first, end = row_starts.begin() + last + 1;
  const int64_t before = *begin, count = *(end - 1) - before;
  out.tokens = tokens.narrow(0, before, count);
  out.targets = targets.narrow(0, before, count);
  out.positions = positions.narrow(0, before, count);
  out.row_starts.assign(begin, end);
  for (int64_t& start : out.row_starts) start -= before;
  out.target_count = (out.targets != kIgnoredTarget).sum().item<int64_t>();
  if (first > 0) out.first_label_count = 0;  // all of them are the first part's
  out.first_token = first_token + before;
  return out;
}

Batch Batch::to(at::Device device) const {
  // Towards the host a copy must have arrived before anybody reads it.
  const bool non_blocking = !device.is_cpu();
  Batch out = *this;
  out.tokens = tokens.to(device, non_blocking);
  out.targets = targets.to(device, non_blocking);
  out.positions = positions.to(device, non_blocking);
  return out;
}

}  // namespace qlorapp
