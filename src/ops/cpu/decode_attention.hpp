// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "../cached_rows.hpp"

namespace qlorapp::ops::cpu {

/// One query for each row of a cache: q (R, H, d), k and v (slots, H_kv, d), the elements of a head together → (R, H, d).
/// The keys of a row may lie in two places. LibTorch's fused kernel packs the keys for its GEMMs, which for one query takes longer than the attention itself.
at::Tensor attend_one_query_each(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CachedRows& cached,
                                 double scale, int64_t window);

}  // namespace qlorapp::ops::cpu
