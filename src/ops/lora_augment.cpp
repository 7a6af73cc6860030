// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/lora_augment.hpp"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "lora_augment_shapes.hpp"

namespace qlorapp::ops {
namespace {

void lora_augment_cpu(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  at::Tensor right = workspace.narrow(0, 0, shape.out).narrow(1, shape.in, shape.spare);
  at::Tensor below = workspace.narrow(0, shape.out, shape.spare).narrow(1, 0, shape.in);
  right.zero_();
  below.zero_();
  int64_t row = 0, rank = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const int64_t rows = b[i].size(0), ranks = a[i].size(0);
    right.narrow(0, row, rows).narrow(1, rank, ranks).copy_(b[i] * scaling[i]);
    below.narrow(0, rank, ranks).copy_(a[i]);
    row += rows;
    rank += ranks;
  }
}

void lora_augment_meta(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  check_lora_augment(workspace, a, b, scaling);
}

}  // namespace

void lora_augment_(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qlorapp::lora_augment_", "")
                             .typed<void(at::Tensor&, at::TensorList, at::TensorList, at::ArrayRef<double>)>();
  op.call(workspace, a, b, scaling);
}

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { m.impl("lora_augment_", lora_augment_cpu); }
TORCH_LIBRARY_IMPL(qlorapp, Meta, m) { m.impl("lora_augment_", lora_augment_meta); }

}  // namespace qlorapp::ops
