// SPDX-License-Identifier: Apache-2.0
#include "io/finite.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <functional>

#include "core/check.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kChunk = int64_t{1} << 22;  // elements

/// Infinite and NaN are what has all bits of the exponent set.
template <class Word>
bool finite_words(const at::Tensor& plain, Word exponent) {
  const auto* const words = static_cast<const Word*>(plain.const_data_ptr());
  return at::parallel_reduce(
      0, plain.numel(), int64_t{1} << 16, true,
      [&](int64_t begin, int64_t end, bool all) {
        Word found = 0;  // no branch, so that the loop is vectorized
        for (int64_t i = begin; i < end; ++i)
          found = static_cast<Word>(found | static_cast<Word>((words[i] & exponent) == exponent));
        return all && found == 0;
      },
      std::logical_and<>());
}

bool finite_by_parts(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.reshape({-1});
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    if (!flat.narrow(0, begin, std::min(kChunk, flat.numel() - begin)).isfinite().all().item<bool>()) return false;
  }
  return true;
}

}  // namespace

bool all_finite(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || !tensor.is_floating_point() || tensor.numel() == 0) return true;
  const at::Tensor plain = tensor.detach().contiguous();
  if (!plain.is_cpu()) return finite_by_parts(plain);
  switch (plain.scalar_type()) {
    case at::kBFloat16:
      return finite_words<uint16_t>(plain, 0x7f80);
    case at::kHalf:
      return finite_words<uint16_t>(plain, 0x7c00);
    case at::kFloat:
      return finite_words<uint32_t>(plain, 0x7f800000);
    case at::kDouble:
      return finite_words<uint64_t>(plain, 0x7ff0000000000000);
    default:
      return finite_by_parts(plain.to(at::kFloat));
  }
}

void check_finite(const at::Tensor& tensor, const std::string& where, const std::string& name) {
  QLORAPP_CHECK_FORMAT(
      all_finite(tensor), "[{}] '{}' must be finite; in {} it holds inf or nan. The file is damaged: download it again{}.", where,
      name, c10::toString(tensor.scalar_type()),
      tensor.scalar_type() == at::kHalf ? ", or its values are too large for float16: compute in bf16 or fp32" : "");
}

}  // namespace qlorapp
