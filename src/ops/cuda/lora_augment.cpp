// SPDX-License-Identifier: Apache-2.0
#include "cuda/lora_augment.hpp"

#include <torch/library.h>

#include "../lora_augment_shapes.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

void lora_augment_cuda(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  static_assert(kMostProjections == cuda::kMostAugmented);
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  const gpu::Launch launch(workspace);
  cuda::Augmentation borders;
  borders.count = static_cast<int>(a.size());
  borders.out = static_cast<int>(shape.out);
  borders.in = static_cast<int>(shape.in);
  borders.spare = static_cast<int>(shape.spare);
  borders.row_stride = workspace.stride(0);
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
  C10_CUDA_CHECK(
      cuda::lora_augment(workspace.mutable_data_ptr(), gpu::float_type("lora_augment_", workspace), borders, launch.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { m.impl("lora_augment_", lora_augment_cuda); }

}  // namespace qlorapp::ops
