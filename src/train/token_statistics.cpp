// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/token_statistics.hpp"

#include <ATen/ATen.h>

namespace qlorapp {

void TokenStatistics::add(const Batch& batch, const LossSum& sum) {
  if (!sum.statistics.defined() || batch.is_filler) return;
  at::Tensor row = at::cat({sum.statistics, at::full({1}, sum.targets, sum.statistics.options())});
  if (batch.first_token == 0) rows_.push_back(std::move(row));
  else rows_.back().add_(row);
}

at::Tensor TokenStatistics::table() const { return rows_.empty() ? at::Tensor() : at::stack(rows_); }

}  // namespace qlorapp
