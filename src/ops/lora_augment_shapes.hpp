// SPDX-License-Identifier: Apache-2.0
// What lora_augment_ asks of its arguments, for every device.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

constexpr size_t kMostProjections = 8;

struct AugmentShape {
  int64_t out = 0, in = 0, spare = 0;  ///< N, K, P.
};

/// Checks the shapes, dtypes and devices of a and b against each other and against `like`. @returns N and K; P is the
/// ranks' sum.
inline AugmentShape check_adapters(const char* op, const at::Tensor& like, at::TensorList a, at::TensorList b,
                                   at::ArrayRef<double> scaling) {
  TORCH_CHECK_VALUE(!a.empty() && a.size() <= kMostProjections && b.size() == a.size() && scaling.size() == a.size(), "[", op,
                    "] a, b and scaling must have one entry a projection, 1 to ", kMostProjections, "; got ", a.size(), ", ",
                    b.size(), " and ", scaling.size(), ".");
  AugmentShape shape;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_double = like.scalar_type() == at::kDouble && a[i].scalar_type() == at::kDouble;
    TORCH_CHECK_TYPE((a[i].scalar_type() == at::kFloat || both_double) && b[i].scalar_type() == a[i].scalar_type(), "[", op,
                     "] a and b must be float32, or float64 as what is written; got ", a[i].scalar_type(), " and ",
                     b[i].scalar_type(), ".");
    TORCH_CHECK_VALUE(a[i].device() == like.device() && b[i].device() == like.device(), "[", op, "] a and b must be on ",
                      like.device(), ", where they are written to; got ", a[i].device(), " and ", b[i].device(), ".");
    TORCH_CHECK_VALUE(a[i].dim() == 2 && b[i].dim() == 2 && a[i].size(0) == b[i].size(1) && a[i].size(1) == a[0].size(1) &&
                          a[i].is_contiguous() && b[i].is_contiguous(),
                      "[", op, "] a must be (r, K) and b (N_i, r), contiguous; got ", a[i].sizes(), " and ", b[i].sizes(), ".");
    shape.out += b[i].size(0);
    shape.spare += a[i].size(0);
  }
  shape.in = a[0].size(1);
  return shape;
}

inline AugmentShape check_lora_augment(const at::Tensor& workspace, at::TensorList a, at::TensorList b,
                                       at::ArrayRef<double> scaling) {
  TORCH_CHECK_VALUE(workspace.dim() == 2 && (workspace.numel() == 0 || workspace.stride(1) == 1),
                    "[lora_augment_] workspace must be (N + P, K + P) with contiguous rows; got ", workspace.sizes(), ".");
  AugmentShape shape = check_adapters("lora_augment_", workspace, a, b, scaling);
  const int64_t rank = shape.spare;
  shape.spare = workspace.size(0) - shape.out;
  TORCH_CHECK_VALUE(shape.spare >= rank && workspace.size(1) == shape.in + shape.spare,
                    "[lora_augment_] workspace must be (N + P, K + P) with N = ", shape.out, ", K = ", shape.in, " and P >= ", rank,
                    "; got ", workspace.sizes(), ".");
  return shape;
}

inline AugmentShape check_lora_borders(const at::Tensor& right, const at::Tensor& below, at::TensorList a, at::TensorList b,
                                       at::ArrayRef<double> scaling) {
  AugmentShape shape = check_adapters("lora_borders_", right, a, b, scaling);
  const int64_t rank = shape.spare;
  shape.spare = below.dim() == 2 ? below.size(0) : 0;
  const auto is = [](const at::Tensor& x, int64_t rows, int64_t columns) {
    return x.dim() == 2 && x.size(0) == rows && x.size(1) == columns && (x.numel() == 0 || x.stride(1) == 1);
  };
  TORCH_CHECK_VALUE(shape.spare >= rank && is(right, shape.out, shape.spare) && is(below, shape.spare, shape.in) &&
                        right.scalar_type() == below.scalar_type() && right.device() == below.device(),
                    "[lora_borders_] right must be (N, P) and below (P, K) of one dtype and device, with contiguous rows, N = ",
                    shape.out, ", K = ", shape.in, " and P >= ", rank, "; got ", right.sizes(), " and ", below.sizes(), ".");
  return shape;
}

/// The rows of the weights that dequantize_4bit_augmented_ stacks are those of b.
inline void check_augmented_rows(at::IntArrayRef rows, at::TensorList b) {
  bool same = rows.size() == b.size();
  for (size_t i = 0; same && i < b.size(); ++i) same = rows[i] == b[i].size(0);
  TORCH_CHECK_VALUE(same, "[dequantize_4bit_augmented_] rows must be those of b, one entry a projection; got ", rows, ".");
}

}  // namespace qlorapp::ops
