// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generation_cache.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

/// (rows · capacity, H, D) as (rows, capacity, H, D).
at::Tensor by_row(const at::Tensor& slots, int64_t rows) { return slots.unflatten(0, {rows, -1}); }

}  // namespace

void GenerationCache::reserve(int64_t wanted) {
  if (wanted <= capacity) return;
  const int64_t grown = std::max(wanted, 2 * capacity);
  const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  for (KeyValueCache& block : blocks) {
    for (at::Tensor* slots : {&block.keys, &block.values}) {
      at::Tensor larger = at::empty({row_count() * grown, slots->size(1), slots->size(2)}, slots->options());
      if (longest > 0) by_row(larger, row_count()).narrow(1, 0, longest).copy_(by_row(*slots, row_count()).narrow(1, 0, longest));
      *slots = std::move(larger);
    }
  }
  capacity = grown;
}

void GenerationCache::select_rows(std::span<const int64_t> rows) {
  std::vector<int64_t> chosen;
  for (const int64_t row : rows) {
    QLORAPP_CHECK_VALUE(row >= 0 && row < row_count(), "[cache] rows must be from 0 to ", row_count() - 1, "; got ", row, ".");
    chosen.push_back(lengths[static_cast<size_t>(row)]);
  }
  const int64_t before = row_count();
  for (KeyValueCache& block : blocks) {
    const at::Tensor index = at::tensor(at::IntArrayRef(rows.data(), rows.size()), at::kLong).to(block.keys.device());
    for (at::Tensor* slots : {&block.keys, &block.values}) *slots = by_row(*slots, before).index_select(0, index).flatten(0, 1);
  }
  lengths = std::move(chosen);
}

void GenerationCache::remove_last(int64_t count) {
  for (const int64_t length : lengths) {
    QLORAPP_CHECK_VALUE(count >= 0 && count <= length, "[cache] cannot remove ", count, " positions from a row that has ", length,
                        ".");
  }
  for (int64_t& length : lengths) length -= count;
}

}  // namespace qlorapp
