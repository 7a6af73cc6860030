// SPDX-License-Identifier: Apache-2.0
#include "few_rows.hpp"

#include <algorithm>

#include <ATen/Parallel.h>

#include "few_rows_kernel.hpp"
#include "four_bit_work.hpp"
#include "panel_buffer.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// Values of the weight that are worth a thread.
constexpr int64_t kFewRowsGrain = int64_t{1} << 15;

bool multiply_by_kernel(FewRows work, const at::Tensor& y, const at::Tensor& x_in, int64_t rows) {
  work.type = dense_type_of(x_in.scalar_type());
  work.columns = x_in.size(1);
  work.tokens = x_in.size(0);
  const FewRowsKernel kernel = few_rows_kernel(cpu_isa(), work);
  if (kernel.multiply == nullptr) return false;
  const at::Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous();
  work.x = x.const_data_ptr();
  work.x_stride = x.stride(0);
  work.y = y.mutable_data_ptr();
  work.y_stride = y.stride(0);
  work.arranged = panel_buffer(static_cast<size_t>(work.tokens * work.columns) * sizeof(float));
  kernel.arrange(work);
  at::parallel_for(0, rows, std::max<int64_t>(kFewRowsGrain / work.columns, 1),
                   [&](int64_t begin, int64_t end) { kernel.multiply(work, begin, end); });
  return true;
}

}  // namespace

bool multiply_few_rows(const at::Tensor& y, const at::Tensor& x, const Dequantize4bit& weight, int64_t rows, bool accumulate) {
  FewRows work;
  work.four_bit = weight;
  work.accumulate = accumulate;
  return multiply_by_kernel(work, y, x, rows);
}

bool multiply_few_rows(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight, bool accumulate) {
  if (weight.element_size() != 2 || weight.stride(1) != 1) return false;
  FewRows work;
  work.dense = static_cast<const uint16_t*>(weight.const_data_ptr());
  work.dense_stride = weight.stride(0);
  work.accumulate = accumulate;
  return multiply_by_kernel(work, y, x, weight.size(0));
}

}  // namespace qlorapp::ops::cpu
