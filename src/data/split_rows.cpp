// SPDX-License-Identifier: Apache-2.0
#include "data/split_rows.hpp"

#include <cmath>
#include <utility>

#include "core/check.hpp"
#include "data/sampler.hpp"

namespace qlorapp {

std::vector<Example> split_off(std::vector<Example>& rows, double size, int64_t seed) {
  std::vector<size_t> row_of(rows.size());  // a row of the file may be several examples, which stay together
  size_t count_of_rows = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool continues = i > 0 && rows[i].row == rows[i - 1].row;
    row_of[i] = continues ? count_of_rows - 1 : count_of_rows++;
  }
  const auto all = static_cast<double>(count_of_rows);
  const double count = size < 1 ? std::ceil(size * all) : size;
  QLORAPP_CHECK_VALUE(size > 0 && count < all,
                      "[val_size] must leave at least one row of {} to train on; got {}. Use a smaller number, or a share below 1.",
                      count_of_rows, size);
  const std::vector<int64_t> order =
      epoch_order(static_cast<int64_t>(count_of_rows), 0, {.strategy = SamplingStrategy::kRandom, .seed = seed, .lengths = {}});
  std::vector<bool> is_taken(count_of_rows);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) is_taken[static_cast<size_t>(order[i])] = true;
  std::vector<Example> taken, kept;
  for (size_t i = 0; i < rows.size(); ++i) (is_taken[row_of[i]] ? taken : kept).push_back(std::move(rows[i]));
  rows = std::move(kept);
  return taken;
}

}  // namespace qlorapp
