// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/keep.hpp"

#include <algorithm>
#include <cmath>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/nearest_name.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 4> kNames{"everything", "attention_only", "input_only", "input_on_host"};

}  // namespace

std::string_view to_string(Keep keep) { return kNames[static_cast<size_t>(keep)]; }

Keep parse_keep(std::string_view text) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == text) return static_cast<Keep>(i);
  }
  throw ValueError(concat("[keep] must be one of ", kNames, "; got '", text, "'.", did_you_mean(text, kNames)));
}

Bytes Saved::nbytes() const {
  Bytes total;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined()) total += Bytes{static_cast<int64_t>(tensor.nbytes())};
  };
  if (!x_on_host) add(x);
  for (const at::Tensor* tensor : {&qkv, &attention, &lse, &x2, &rstd1, &rstd2, &gate_up}) add(*tensor);
  const at::Tensor* before = nullptr;
  for (const at::Tensor& tensor : u) {  // those of a stack share their memory, which may be wider than they are
    if (!tensor.defined()) continue;
    if (before == nullptr || !tensor.is_alias_of(*before)) total += Bytes{static_cast<int64_t>(tensor.storage().nbytes())};
    before = &tensor;
  }
  return total;
}

Bytes Saved::host_nbytes() const { return x_on_host && x.defined() ? Bytes{static_cast<int64_t>(x.nbytes())} : Bytes{}; }

std::vector<Segment> keep_in_each_block(int64_t blocks, Keep keep) {
  std::vector<Segment> segments;
  for (int64_t i = 0; i < blocks; ++i) segments.push_back({i, i + 1, keep});
  return segments;
}

std::vector<Segment> checkpoint_every(int64_t blocks, int64_t k, Keep keep) {
  QLORAPP_CHECK_VALUE(k >= 1, "[checkpoint_every] the number of blocks a segment must be at least 1; got ", k, ".");
  QLORAPP_CHECK_VALUE(
      keep == Keep::kInputOnly || keep == Keep::kInputOnHost,
      "[checkpoint_every] of several blocks the first one's input is kept: keep must be input_only or input_on_host; got ",
      to_string(keep), ".");
  std::vector<Segment> segments;
  for (int64_t begin = 0; begin < blocks; begin += k) segments.push_back({begin, std::min(begin + k, blocks), keep});
  return segments;
}

std::vector<Segment> checkpoint_sqrt(int64_t blocks, Keep keep) {
  return checkpoint_every(blocks, std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(blocks)))), keep);
}

}  // namespace qlorapp
