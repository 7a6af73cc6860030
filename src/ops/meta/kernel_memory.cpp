// SPDX-License-Identifier: Apache-2.0
// Buffers of LibTorch's attention kernels, by their sources in torch 2.11:
//
//     CPU        aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: tiles a thread
//     cuDNN      aten/src/ATen/native/cudnn/MHA.cpp and cudnn-frontend's scaled_dot_product_flash_attention.h, backward: sums
//     of dQ
//                and of the softmax in float32; dK and dV of every query head if heads are grouped
//     flash      aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: the same, rows rounded to 128; where
//                gradients are to be deterministic, sums of dQ for each multiprocessor over the heads of the batch
//     efficient  aten/src/ATen/native/transformers/cuda/attention_backward.cu and src/ops/cuda/attention.cpp: expanded k and v
#include "kernel_memory.hpp"

#include <algorithm>
#include <tuple>

#include <ATen/ATen.h>

#include "../cpu/gemm.hpp"
#include "../cuda_memory.hpp"
#include "../layer_shapes.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp::ops::meta {
namespace {

using at::Tensor;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/// Sizes that both passes ask for.
struct Shape {
  int64_t tokens, heads, kv_heads, d;
  RowLayout layout;
  at::TensorOptions options, sums;

  Shape(const Tensor& q, const Tensor& k, at::IntArrayRef row_starts)
      : tokens(q.size(0)),
        heads(q.size(1)),
        kv_heads(k.size(1)),
        d(q.size(2)),
        layout(row_starts),
        options(q.options()),
        sums(q.options().dtype(accumulate_type(q))) {}

  [[nodiscard]] bool grouped() const { return heads != kv_heads; }
  [[nodiscard]] bool sixteen_bits() const { return options.dtype() != sums.dtype(); }
};

/// Rows of queries a tile of the CPU kernels.
int64_t cpu_tile(int64_t length) { return std::min<int64_t>(length, length >= 768 ? 256 : length >= 192 ? 64 : 32); }
constexpr int64_t kCpuKeys = 512;

/// On a CPU grouped rows go through the kernel one by one; others of one length together.
int64_t cpu_run_tokens(const Shape& shape) { return !shape.grouped() && shape.layout.equal ? shape.tokens : shape.layout.longest; }

Scratch cpu_attention(const Shape& shape, int64_t threads) {
  const int64_t length = shape.layout.longest, run = cpu_run_tokens(shape), tile = cpu_tile(length),
                keys = std::min(kCpuKeys, length);
  Scratch taken{at::empty({threads, tile * (keys + 2 + shape.d)}, shape.sums), at::empty({run, shape.heads}, shape.sums)};
  if (shape.sixteen_bits()) taken.push_back(at::empty({threads, tile, keys}, shape.options));
  if (run != shape.tokens) taken.push_back(at::empty({run, shape.heads, shape.d}, shape.options));  // a run's part of the result
  return taken;
}

Scratch cpu_attention_backward(const Shape& shape, int64_t threads) {
  const int64_t length = shape.layout.longest, run = cpu_run_tokens(shape), tile = cpu_tile(length),
                keys = std::min(kCpuKeys, length);
  Scratch taken;
  const auto heads = [&](int64_t count) { taken.push_back(at::empty({run, count, shape.d}, shape.sums)); };
  if (shape.sixteen_bits()) {  // dout, q and out, k and v in float32
    for (int i = 0; i < 3; ++i) heads(shape.heads);
    for (int i = 0; i < 2; ++i) heads(shape.kv_heads);
  }
  for (int i = 0; i < 4; ++i) heads(shape.heads);  // dq, dk and dv of every query head, and one of them in the order of ours
  taken.push_back(at::empty({threads, 2 * tile * keys + tile}, shape.sums));
  return taken;
}

Scratch gpu_attention(const Shape& shape, AttentionKernel kernel) {
  Scratch taken;
  const int64_t rows = shape.layout.rows;
  if (kernel == AttentionKernel::kEfficient) {
    if (shape.grouped()) {
      for (int i = 0; i < 2; ++i) taken.push_back(at::empty({shape.tokens, shape.heads, shape.d}, shape.options));
    }
    taken.push_back(at::empty({rows, shape.heads, statistic_stride(shape.layout.longest)}, shape.sums));
  } else if (rows > 1 && shape.layout.equal) {
    taken.push_back(at::empty({shape.heads, shape.tokens}, shape.sums));  // the statistic by rows
  }
  return taken;
}

/// Of flash's dQ, where sums must have one order: each multiprocessor's blocks add up their own.
int64_t sums_of_dq(const Shape& shape, const PlannedDevice& device, bool deterministic) {
  if (!deterministic) return 1;
  const int64_t blocks = shape.layout.rows * shape.heads;
  return std::max<int64_t>(1, (device.multiprocessors + blocks - 1) / blocks);
}

Scratch gpu_attention_backward(const Shape& shape, AttentionKernel kernel, int64_t sums_of_dq) {
  Scratch taken;
  const int64_t rows = shape.layout.rows, longest = shape.layout.longest;
  const auto whole = [&](const at::TensorOptions& options) {
    taken.push_back(at::empty({shape.tokens, shape.heads, shape.d}, options));
  };
  const auto statistic = [&] { taken.push_back(at::empty({shape.heads, shape.tokens}, shape.sums)); };
  switch (kernel) {
    case AttentionKernel::kCudnn: {
      if (rows > 1) statistic();
      const int64_t element = shape.grouped() ? 2 * static_cast<int64_t>(shape.options.dtype().itemsize()) : 0;
      taken.push_back(at::empty({shape.tokens * shape.heads * (shape.d * (4 + element) + 4)}, shape.options.dtype(at::kByte)));
      break;
    }
    case AttentionKernel::kFlash: {
      if (rows > 1 && shape.layout.equal) statistic();
      const int64_t padded = shape.layout.equal ? rows * round_up(longest, 128) : shape.tokens + 128 * rows;
      taken.push_back(at::empty({padded, shape.heads}, shape.sums));
      taken.push_back(at::empty({sums_of_dq, padded, shape.heads, round_up(shape.d, 32)}, shape.sums));
      if (shape.grouped()) {
        for (int i = 0; i < 2; ++i) whole(shape.options);
      }
      break;
    }
    case AttentionKernel::kEfficient:
      for (int i = 0; i < (shape.grouped() ? 4 : 0); ++i) whole(shape.options);  // k, v, dk and dv of every query head
      for (int i = 0; i < 2; ++i) taken.push_back(at::empty({rows, shape.heads, statistic_stride(longest)}, shape.sums));
      statistic();
      if (shape.sixteen_bits()) whole(shape.sums);  // sums of dq
      break;
  }
  return taken;
}

}  // namespace

Scratch attention_scratch(const Tensor& q, const Tensor& k, at::IntArrayRef row_starts, bool deterministic, int64_t window) {
  const PlannedDevice* const device = planned_device();
  if (device == nullptr || q.size(0) == 0) return {};
  const MemoryUseScope use(MemoryUse::kAttention);
  const Shape shape(q, k, row_starts);
  if (device->type == at::kCPU) return cpu_attention(shape, device->threads);
  return gpu_attention(shape, attention_kernel(q, shape.layout, device->architecture, is_deterministic(deterministic), window));
}

Scratch attention_backward_scratch(const Tensor& q, const Tensor& k, at::IntArrayRef row_starts, bool deterministic,
                                   int64_t window) {
  const PlannedDevice* const device = planned_device();
  if (device == nullptr || q.size(0) == 0) return {};
  const MemoryUseScope use(MemoryUse::kAttention);
  const Shape shape(q, k, row_starts);
  if (device->type == at::kCPU) return cpu_attention_backward(shape, device->threads);
  const bool ordered = is_deterministic(deterministic);
  return gpu_attention_backward(shape, attention_kernel(q, shape.layout, device->architecture, ordered, window),
                                sums_of_dq(shape, *device, ordered));
}

Scratch cached_attention_scratch(const Tensor& q, at::IntArrayRef row_starts, at::IntArrayRef cache_lengths, int64_t window) {
  const PlannedDevice* const device = planned_device();
  if (device == nullptr || device->type != at::kCPU || cache_lengths.empty()) return {};
  const MemoryUseScope use(MemoryUse::kAttention);
  int64_t queries = 0, keys = 0;
  bool masked = false;
  for (size_t row = 0; row < cache_lengths.size(); ++row) {
    const int64_t own = row_starts[row + 1] - row_starts[row];
    queries = std::max(queries, own);
    keys = std::max(keys, cache_lengths[row]);
    masked = masked || cache_lengths[row] > own || (window > 0 && window < cache_lengths[row]);
  }
  constexpr int64_t kQueries = 64;  // as src/ops/cpu/attention.cpp takes where there is a mask
  if (masked) queries = std::min(queries, kQueries);
  const int64_t heads = q.size(1), d = q.size(2), tile = cpu_tile(queries), together = std::min(kCpuKeys, keys);
  const at::TensorOptions options = q.options(), sums = options.dtype(accumulate_type(q));
  Scratch taken{at::empty({device->threads, tile * (together + 2 + d)}, sums), at::empty({queries, heads}, sums),
                at::empty({queries, heads, d}, options)};
  if (options.dtype() != sums.dtype()) taken.push_back(at::empty({device->threads, tile, together}, options));
  if (masked && queries > 1) taken.push_back(at::empty({queries, keys}, options));
  return taken;
}

Scratch linear_4bit_scratch(const Tensor& y, const Tensor& x, int64_t rows, int64_t columns, bool accumulate) {
  const PlannedDevice* const device = planned_device();
  if (device == nullptr) return {};
  const MemoryUseScope use(MemoryUse::kDequantized);
  if (device->type == at::kCUDA) {
    return {at::empty({rows, columns}, x.options().dtype(x.scalar_type() == at::kDouble ? at::kFloat : x.scalar_type()))};
  }
  if (cpu::multiplies_natively(x.scalar_type())) return {};  // panels are the thread's own, torch does not count them
  Scratch taken{at::empty(y.sizes(), y.options().dtype(at::kFloat)), at::empty(x.sizes(), x.options().dtype(at::kFloat))};
  if (accumulate && !y.is_contiguous()) taken.push_back(at::empty(y.sizes(), y.options().dtype(at::kFloat)));
  return taken;
}

std::tuple<Tensor, Tensor> linear_cross_entropy_planned(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                        bool need_gradient, int64_t chunk_rows, int64_t target_count) {
  const int64_t vocabulary = weight.size(0), all_rows = hidden.size(0), count = target_count < 0 ? all_rows : target_count;
  if (planned_device()->type == at::kCUDA) {
    const CrossEntropyBuffers buffers(hidden, vocabulary, targets.options(), count, chunk_rows, need_gradient);
    return {buffers.total, buffers.gradient};
  }
  const bool everything = count == all_rows;
  Tensor gradient = need_gradient ? at::empty_like(hidden, at::MemoryFormat::Contiguous) : at::empty({0}, hidden.options());
  const MemoryUseScope use(MemoryUse::kLogits);
  const int64_t chunk = std::min(chunk_rows, count);
  const Tensor logits = at::empty({chunk, vocabulary}, hidden.options());
  const Tensor h = everything ? hidden.narrow(0, 0, chunk) : at::empty({chunk, hidden.size(1)}, hidden.options());
  cpu::multiply_transposed(logits, h, weight);
  if (need_gradient) {
    const Tensor compact = everything ? gradient.narrow(0, 0, chunk) : at::empty_like(h);
    cpu::multiply(compact, logits, weight);
  }
  return {at::empty({}, hidden.options().dtype(accumulate_type(hidden))), gradient};
}

}  // namespace qlorapp::ops::meta
