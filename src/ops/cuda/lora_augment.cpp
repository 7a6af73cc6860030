// SPDX-License-Identifier: Apache-2.0
#include "cuda/lora_augment.hpp"

#include <torch/library.h>

#include "../lora_augment_shapes.hpp"
#include "dequantize.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

static_assert(kMostProjections == cuda::kMostAugmented);

/// @param row_stride  of the workspace, if there is one.
cuda::Augmentation borders_of(const AugmentShape& shape, int64_t row_stride, at::TensorList a, at::TensorList b,
                              at::ArrayRef<double> scaling) {
  cuda::Augmentation borders;
  borders.count = static_cast<int>(a.size());
  borders.out = static_cast<int>(shape.out);
  borders.in = static_cast<int>(shape.in);
  borders.spare = static_cast<int>(shape.spare);
  borders.row_stride = row_stride;
  int row = 0, rank = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    auto& own = borders.projections[i];
    own = {a[i].const_data_ptr<float>(),
           b[i].const_data_ptr<float>(),
           static_cast<float>(scaling[i]),
           static_cast<int>(b[i].size(0)),
           static_cast<int>(a[i].size(0)),
           row,
           rank};
    row += own.rows;
    rank += own.rank;
  }
  return borders;
}

void lora_augment_cuda(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  const gpu::Launch launch(workspace);
  C10_CUDA_CHECK(cuda::lora_augment(workspace.mutable_data_ptr(), gpu::float_type("lora_augment_", workspace),
                                    borders_of(shape, workspace.stride(0), a, b, scaling), launch.stream()));
}

void lora_borders_cuda(at::Tensor& right, at::Tensor& below, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_borders(right, below, a, b, scaling);
  const gpu::Launch launch(right);
  C10_CUDA_CHECK(cuda::lora_borders({right.mutable_data_ptr(), right.stride(0)}, {below.mutable_data_ptr(), below.stride(0)},
                                    gpu::float_type("lora_borders_", right), borders_of(shape, 0, a, b, scaling), launch.stream()));
}

void augmented_cuda(at::Tensor& workspace, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                    at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                    std::string_view quant_type, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  check_augmented_rows(rows, b);
  const at::Tensor weights = workspace.narrow(0, 0, shape.out).narrow(1, 0, shape.in);
  gpu::dequantize_stack("dequantize_4bit_augmented_", weights,
                        {packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type},
                        borders_of(shape, workspace.stride(0), a, b, scaling));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("lora_augment_", lora_augment_cuda);
  m.impl("lora_borders_", lora_borders_cuda);
  m.impl("dequantize_4bit_augmented_", augmented_cuda);
}

}  // namespace qlorapp::ops
