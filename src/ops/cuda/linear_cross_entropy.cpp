// SPDX-License-Identifier: Apache-2.0
// Chunks of rows: one GEMM to logits, one kernel that turns them into their gradient, one GEMM back. No host sync.
#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "../cuda_memory.hpp"
#include "../layer_shapes.hpp"
#include "../row_views.hpp"
#include "cuda/cross_entropy.hpp"
#include "cuda/rows.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& hidden_in, const at::Tensor& weight,
                                                        const at::Tensor& targets, const std::optional<at::Tensor>& grad_scale,
                                                        bool need_gradient, int64_t chunk_rows, int64_t target_count, double factor,
                                                        double cap, const std::optional<at::Tensor>& statistics) {
  constexpr std::string_view kOp = "linear_cross_entropy";
  check_linear_cross_entropy(kOp, hidden_in, weight, targets, grad_scale, statistics, chunk_rows);
  gpu::check_device(kOp, "targets", targets, hidden_in);
  const LogitRule rule = logit_rule(factor, cap);
  const cuda::Float type = gpu::float_type(kOp, hidden_in);
  const int64_t all_rows = hidden_in.size(0), width = hidden_in.size(1), vocabulary = weight.size(0);
  TORCH_CHECK_VALUE(target_count <= all_rows, "[linear_cross_entropy] target_count must be at most the number of rows, ", all_rows,
                    "; got ", target_count, ". Count the targets >= 0, or leave it out.");
  const gpu::Launch launch(hidden_in);
  const at::Tensor hidden = as_rows(hidden_in);
  const at::Tensor scale = grad_scale.has_value() && grad_scale->defined()
                               ? grad_scale->to(hidden.device(), at::kFloat, /*non_blocking=*/true)
                               : at::Tensor();
  const float* const scale_data = scale.defined() ? scale.const_data_ptr<float>() : nullptr;

  const int64_t count = target_count < 0 ? all_rows : target_count;
  const at::Tensor all_targets = targets.contiguous();
  const CrossEntropyBuffers buffers(hidden, vocabulary, all_targets.options(), count, chunk_rows, need_gradient,
                                    statistics.has_value());
  const auto& [index, own_labels, gradient, losses, total, logits_buffer, rows_buffer, of_rows, chunk] = buffers;
  const bool everything = !index.defined();
  const at::Tensor& labels = everything ? all_targets : own_labels;
  if (!everything) {
    C10_CUDA_CHECK(cuda::compact_targets(all_targets.const_data_ptr<int64_t>(), all_rows, count, index.mutable_data_ptr<int64_t>(),
                                         labels.mutable_data_ptr<int64_t>(), launch.stream()));
  }
  const int64_t padded = CrossEntropyBuffers::padded(vocabulary);
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t size = std::min(chunk, count - begin);
    at::Tensor rows = everything ? hidden.narrow(0, begin, size) : rows_buffer.narrow(0, 0, size);
    const int64_t* const chunk_index = everything ? nullptr : index.const_data_ptr<int64_t>() + begin;
    if (!everything) {
      C10_CUDA_CHECK(cuda::gather_rows(type, hidden.const_data_ptr(), hidden.stride(0), all_rows, chunk_index,
                                       rows.mutable_data_ptr(), width, size, width, launch.stream()));
    }
    at::Tensor logits = logits_buffer.narrow(0, 0, size);
    at::mm_out(logits, rows, weight.t());
    if (of_rows.defined()) {
      C10_CUDA_CHECK(cuda::row_statistics(type, logits.const_data_ptr(), padded, labels.const_data_ptr<int64_t>() + begin,
                                          of_rows.mutable_data_ptr<float>() + begin, count, size, vocabulary,
                                          static_cast<float>(rule.factor), static_cast<float>(rule.cap), launch.stream()));
    }
    C10_CUDA_CHECK(cuda::cross_entropy(type, logits.mutable_data_ptr(), padded, labels.const_data_ptr<int64_t>() + begin,
                                       losses.mutable_data_ptr<float>() + begin, scale_data, need_gradient, size, vocabulary,
                                       static_cast<float>(rule.factor), static_cast<float>(rule.cap), launch.stream()));
    if (!need_gradient) continue;
    at::Tensor target = everything ? gradient.narrow(0, begin, size) : rows;
    at::mm_out(target, logits, weight);
    if (!everything) {
      C10_CUDA_CHECK(cuda::scatter_rows(type, rows.const_data_ptr(), width, chunk_index, gradient.mutable_data_ptr(), width,
                                        all_rows, size, width, launch.stream()));
    }
  }
  C10_CUDA_CHECK(cuda::sum_losses(losses.const_data_ptr<float>(), count, total.mutable_data_ptr<float>(), launch.stream()));
  if (of_rows.defined()) at::Tensor(*statistics).add_(of_rows.sum(1));
  return {total, gradient};
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { m.impl("linear_cross_entropy", linear_cross_entropy); }

}  // namespace qlorapp::ops
