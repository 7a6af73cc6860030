// SPDX-License-Identifier: Apache-2.0
#include "data/sampler.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/nearest_name.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 3> kStrategies{"random", "sequential", "group_by_length"};

/// torch.randperm(rows, generator=torch.Generator().manual_seed(seed)); torch reads a negative seed as its two's complement.
std::vector<int64_t> permutation(int64_t rows, int64_t seed) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  const at::Tensor order = at::randperm(rows, generator, at::TensorOptions().dtype(at::kLong));
  const auto* data = order.const_data_ptr<int64_t>();
  return {data, data + rows};
}

/// Shuffled, then sorted by falling length inside mega-batches of up to 50 groups; the longest row of all comes first, so that
/// memory runs out at once or not at all.
std::vector<int64_t> grouped(std::vector<int64_t> order, const SamplerOptions& options) {
  const auto rows = static_cast<int64_t>(order.size());
  const int64_t mega = std::max<int64_t>(std::min<int64_t>(rows / (options.group_size * 4), 50), 1) * options.group_size;
  const auto length = [&](int64_t row) { return options.lengths[static_cast<std::size_t>(row)]; };
  int64_t longest = 0;  // start of the mega-batch that holds the longest row
  for (int64_t begin = 0; begin < rows; begin += mega) {
    const auto first = order.begin() + begin, last = order.begin() + std::min(begin + mega, rows);
    std::stable_sort(first, last, [&](int64_t a, int64_t b) { return length(a) > length(b); });
    if (length(*first) > length(order[static_cast<std::size_t>(longest)])) longest = begin;
  }
  std::swap(order[0], order[static_cast<std::size_t>(longest)]);
  return order;
}

}  // namespace

SamplingStrategy sampling_strategy(std::string_view name) {
  for (std::size_t i = 0; i < kStrategies.size(); ++i) {
    if (name == kStrategies[i]) return static_cast<SamplingStrategy>(i);
  }
  throw ValueError(message("[train_sampling_strategy] must be one of {}; got '{}'.{}", joined(kStrategies), name,
                           did_you_mean(name, kStrategies)));
}

std::vector<int64_t> epoch_order(int64_t rows, int64_t epoch, const SamplerOptions& options) {
  QLORAPP_CHECK_VALUE(
      rows > 0 && epoch >= 0,
      "[sampler] an order needs at least one row and an epoch of at least 0; got {} rows and epoch {}. Check the data.", rows,
      epoch);
  const auto seed = static_cast<int64_t>(static_cast<uint64_t>(options.seed) + static_cast<uint64_t>(epoch));
  switch (options.strategy) {
    case SamplingStrategy::kRandom:
      return permutation(rows, seed);
    case SamplingStrategy::kSequential: {
      std::vector<int64_t> order(static_cast<std::size_t>(rows));
      std::iota(order.begin(), order.end(), int64_t{0});
      return order;
    }
    case SamplingStrategy::kGroupByLength:
      QLORAPP_CHECK_VALUE(options.group_size > 0 && static_cast<int64_t>(options.lengths.size()) == rows,
                          "[sampler] group_by_length needs the length of each of {} rows and a group size above 0; got {} lengths "
                          "and size {}. Pass both.",
                          rows, options.lengths.size(), options.group_size);
      return grouped(permutation(rows, seed), options);
  }
  return {};
}

}  // namespace qlorapp
