// SPDX-License-Identifier: Apache-2.0
/// RMS normalization on the GPU: the rule, the rounding points and the names of src/ops/norm.hpp.
///
/// A row is read once, kept in registers while its sum forms, and written. Rows lie any distance apart (strides in elements),
/// so that y may be the first columns of a wider GEMM input. 16-byte accesses where base, stride and width allow them; any
/// other layout goes element by element.
///
/// Against the CPU operator: `sum` is bit-equal. rstd comes from float sums in another order, within 4 ulp; everything after it
/// has the same roundings, so y and dx in 16 bits differ only where that last bit of rstd crosses a rounding boundary (below
/// 0.1 % of the elements of y, by one ulp before the product with the weight, two after). Deterministic.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "qlorapp/format/family.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

using format::NormRule;

/// A matrix of rows of `width` elements each; `stride` elements from one row to the next.
struct Rows {
  const void* data;
  int64_t stride;
};
struct WrittenRows {
  void* data = nullptr;
  int64_t stride = 0;
};

/// y = rms_norm(x), rstd (rows) float.
cudaError_t rms_norm(Float type, Rows x, const void* weight, WrittenRows y, float* rstd, int64_t rows, int64_t width, float eps,
                     NormRule rule, Stream stream);

/// sum = x + residual, y = rms_norm(sum). `sum` may be x or residual.
cudaError_t add_rms_norm(Float type, Rows x, Rows residual, const void* weight, WrittenRows sum, WrittenRows y, float* rstd,
                         int64_t rows, int64_t width, float eps, NormRule rule, Stream stream);

/// dx = gradient; with `accumulate` dx += gradient, and y becomes what rms_norm wrote (y may be dy; else it is not looked at).
cudaError_t rms_norm_backward(Float type, Rows dy, Rows x, const void* weight, const float* rstd, WrittenRows dx, WrittenRows y,
                              bool accumulate, int64_t rows, int64_t width, NormRule rule, Stream stream);

}  // namespace qlorapp::cuda
