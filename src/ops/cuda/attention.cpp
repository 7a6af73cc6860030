// SPDX-License-Identifier: Apache-2.0
// Attention of packed rows by LibTorch's fused kernels, called directly so that the softmax statistic is ours to keep:
//
//     cuDNN       sm_90, sm_100; 16 bits; one row, or rows of one length; strided q, k, v and unexpanded grouped heads
//     flash       sm_80 and newer; 16 bits; any rows, through cumulative lengths; unexpanded grouped heads
//     efficient   every GPU and float32; any rows; k and v are expanded to the heads of q
//
// The choice depends on shapes, dtype, GPU and what was asked for only, so that forward and backward agree. The kernel that
// holds a (T, T) matrix is never among them. Deterministic are flash and efficient, where torch's switch is on while their
// backward pass is called; cuDNN adds dq up with atomics. Causal masks end at the last key of the row.
#include <algorithm>
#include <limits>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>

#include "../cuda_memory.hpp"
#include "../layer_shapes.hpp"
#include "launch.hpp"
#include "ops/operator.hpp"

namespace qlorapp::ops {
namespace {

using at::Tensor;

/// The boundaries of ragged rows on the device, and where each token's statistic lies in a (H, rows, stride) tensor.
struct RowsOnDevice {
  std::vector<int64_t> starts;
  c10::Device device{c10::kCPU};
  Tensor cu_seqlens;  // int32 (rows + 1)
  Tensor place;       // int64 (M): row · stride + position
  int64_t stride = 0;
  c10::StreamId stream = 0;  // that the copies are ordered in
};

/// Through pinned memory: a plain copy to the device would wait for it.
template <class Integer>
Tensor to_device(const std::vector<Integer>& values, at::ScalarType dtype, c10::Device device) {
  const Tensor host = at::empty({static_cast<int64_t>(values.size())}, at::TensorOptions().dtype(dtype).pinned_memory(true));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<Integer>());
  return host.to(device, dtype, /*non_blocking=*/true);
}

/// Every layer of a micro-batch asks for the same rows, so the last answer is kept, for the stream that its copies are ordered in.
/// What a captured graph has read stays for good, because every replay reads it again.
const RowsOnDevice& rows_on_device(const RowLayout& layout, c10::Device device) {
  thread_local RowsOnDevice last;
  thread_local std::vector<RowsOnDevice> captured;
  const c10::StreamId stream = at::cuda::getCurrentCUDAStream(device.index()).id();
  const bool capturing = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  if (last.cu_seqlens.defined() && last.device == device && last.starts == layout.starts && last.stream == stream) {
    if (capturing && (captured.empty() || !captured.back().cu_seqlens.is_same(last.cu_seqlens))) captured.push_back(last);
    return last;
  }
  if (capturing) {
    throw KernelError({__func__, __FILE__, __LINE__},
                      "[attention] ragged rows must have been seen on this stream before a graph is captured. Run the micro-step "
                      "once, then capture it.");
  }
  std::vector<int32_t> starts(layout.starts.size());
  TORCH_CHECK_VALUE(layout.starts.back() <= std::numeric_limits<int32_t>::max(),
                    "[attention] a batch of ragged rows must have fewer than 2^31 tokens; got ", layout.starts.back(),
                    ". Use smaller batches.");
  std::transform(layout.starts.begin(), layout.starts.end(), starts.begin(), [](int64_t s) { return static_cast<int32_t>(s); });
  const int64_t stride = statistic_stride(layout.longest);
  std::vector<int64_t> place(static_cast<size_t>(layout.starts.back()));
  for (size_t r = 0; r + 1 < layout.starts.size(); ++r) {
    for (int64_t m = layout.starts[r]; m < layout.starts[r + 1]; ++m)
      place[static_cast<size_t>(m)] = static_cast<int64_t>(r) * stride + m - layout.starts[r];
  }
  last = {layout.starts, device, to_device(starts, at::kInt, device), to_device(place, at::kLong, device), stride, stream};
  return last;
}

using Kernel = AttentionKernel;

/// While it lives, LibTorch's attention adds up in one order. New memory is not filled meanwhile, which that switch does, too.
class Deterministic {
 public:
  explicit Deterministic(bool wanted)
      : wanted_(wanted),
        algorithms_(torch_.deterministicAlgorithms()),
        warn_only_(torch_.deterministicAlgorithmsWarnOnly()),
        fill_(torch_.deterministicFillUninitializedMemory()) {
    if (!wanted_) return;
    torch_.setDeterministicAlgorithms(true, /*warn_only=*/false);
    torch_.setDeterministicFillUninitializedMemory(false);
  }
  ~Deterministic() {
    if (!wanted_) return;
    torch_.setDeterministicAlgorithms(algorithms_, warn_only_);
    torch_.setDeterministicFillUninitializedMemory(fill_);
  }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;

 private:
  at::Context& torch_ = at::globalContext();
  bool wanted_, algorithms_, warn_only_, fill_;
};

Kernel choose(const Tensor& q, const RowLayout& layout, bool deterministic, int64_t window) {
  // A build for an older GPU takes that GPU's way on a newer one, too: so the T4's can be tested.
  const cudaDeviceProp* const gpu = at::cuda::getCurrentDeviceProperties();
  return attention_kernel(q, layout, std::min(gpu->major * 10 + gpu->minor, gpu::code_architecture()), deterministic, window);
}

/// The elements of a head lie together, and every head begins at 16 bytes.
Tensor dense_heads(const Tensor& x) {
  const int64_t pack = 16 / static_cast<int64_t>(x.element_size());
  const bool dense = x.stride(2) == 1 && x.stride(0) % pack == 0 && x.stride(1) % pack == 0 &&
                     reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return dense ? x : x.contiguous();
}

/// (M, H, d) as (rows, T, H, d).
Tensor batched(const Tensor& x, const RowLayout& layout) { return x.unflatten(0, {layout.rows, layout.longest}); }
/// (M, H, d) as (rows, H, T, d).
Tensor heads_first(const Tensor& x, const RowLayout& layout) { return batched(x, layout).transpose(1, 2); }

/// k or v with as many heads as q.
Tensor expanded(const Tensor& x, int64_t heads) {
  if (x.size(1) == heads) return x;
  return x.unsqueeze(2).expand({x.size(0), x.size(1), heads / x.size(1), x.size(2)}).reshape({x.size(0), heads, x.size(2)});
}
/// The gradient of k or v from that of its expansion.
Tensor summed(const Tensor& x, int64_t kv_heads) {
  return x.size(1) == kv_heads ? x : x.unflatten(1, {kv_heads, x.size(1) / kv_heads}).sum(2);
}

/// A random state that no kernel reads, because nothing is dropped; operators still check that it is on the device.
Tensor no_random_state(const Tensor& q) { return at::empty({}, q.options().dtype(at::kLong)); }

/// What kernels take for a window: keys before the query for flash, keys in all for efficient.
struct Window {
  std::optional<int64_t> left, size;

  explicit Window(int64_t window, int64_t longest) {
    if (window <= 0 || window >= longest) return;  // then it is none
    left = window - 1;
    size = window;
  }
};

constexpr int64_t kCausalFromStart = 1, kCausalToEnd = 2;  // custom_mask_type of the efficient kernel

struct Efficient {
  std::optional<Tensor> cu_seqlens;
  Tensor place;
  int64_t rows, longest, stride;

  Efficient(const Tensor& q, const RowLayout& layout)
      : rows(layout.rows), longest(layout.longest), stride(statistic_stride(layout.longest)) {
    if (layout.equal) return;
    const RowsOnDevice& on_device = rows_on_device(layout, q.device());
    cu_seqlens = on_device.cu_seqlens;
    place = on_device.place;
  }
  [[nodiscard]] Tensor batch(const Tensor& x) const { return cu_seqlens ? x.unsqueeze(0) : x.unflatten(0, {rows, longest}); }
  /// (rows, H, stride) of the kernel as our (H, M), and back; its padding is infinite.
  [[nodiscard]] Tensor statistic(const Tensor& lse) const {
    const int64_t heads = lse.size(1);
    if (!cu_seqlens) return lse.narrow(2, 0, longest).transpose(0, 1).reshape({heads, rows * longest});
    return lse.transpose(0, 1).reshape({heads, rows * lse.size(2)}).index_select(1, place);
  }
  [[nodiscard]] Tensor padded(const Tensor& lse) const {
    const int64_t heads = lse.size(0);
    const Tensor all = at::full({heads, rows * stride}, std::numeric_limits<float>::infinity(), lse.options());
    if (cu_seqlens) all.index_copy_(1, place, lse);
    else all.view({heads, rows, stride}).narrow(2, 0, longest).copy_(lse.view({heads, rows, longest}));
    return all.view({heads, rows, stride}).transpose(0, 1).contiguous();
  }
};

std::tuple<Tensor, Tensor> attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, at::IntArrayRef row_starts,
                                     double scale, bool deterministic, int64_t window) {
  check_attention("attention", q_in, k_in, v_in, row_starts);
  gpu::float_type("attention", q_in);
  const gpu::Launch launch(q_in);
  const Tensor q = dense_heads(q_in), k = dense_heads(k_in), v = dense_heads(v_in);
  const int64_t tokens = q.size(0), heads = q.size(1);
  if (tokens == 0) return {at::empty(q.sizes(), q.options()), at::empty({heads, 0}, q.options().dtype(at::kFloat))};
  const RowLayout layout(row_starts);
  const Window slide(window, layout.longest);
  switch (choose(q, layout, is_deterministic(deterministic), window)) {
    case Kernel::kCudnn: {
      const auto result = at::_scaled_dot_product_cudnn_attention(
          heads_first(q, layout), heads_first(k, layout), heads_first(v, layout), std::nullopt, /*compute_log_sumexp=*/true, 0.0,
          /*is_causal=*/true, /*return_debug_mask=*/false, scale);
      return {std::get<0>(result).transpose(1, 2).reshape(q.sizes()),
              std::get<1>(result).squeeze(-1).transpose(0, 1).reshape({heads, tokens})};
    }
    case Kernel::kFlash: {
      if (layout.equal) {
        const auto result =
            at::_flash_attention_forward(batched(q, layout), batched(k, layout), batched(v, layout), std::nullopt, std::nullopt,
                                         layout.longest, layout.longest, 0.0, true, false, scale, slide.left);
        return {std::get<0>(result).reshape(q.sizes()), std::get<1>(result).transpose(0, 1).reshape({heads, tokens})};
      }
      const Tensor cu_seqlens = rows_on_device(layout, q.device()).cu_seqlens;
      const auto result = at::_flash_attention_forward(q, k, v, cu_seqlens, cu_seqlens, layout.longest, layout.longest, 0.0, true,
                                                       false, scale, slide.left);
      return {std::get<0>(result), std::get<1>(result)};  // the statistic of ragged rows is (H, M) already
    }
    case Kernel::kEfficient:
      break;
  }
  const Efficient efficient(q, layout);
  const auto result =
      at::_efficient_attention_forward(efficient.batch(q), efficient.batch(expanded(k, heads)), efficient.batch(expanded(v, heads)),
                                       std::nullopt, efficient.cu_seqlens, efficient.cu_seqlens, layout.longest, layout.longest,
                                       0.0, kCausalFromStart, true, scale, std::nullopt, slide.size);
  return {std::get<0>(result).reshape(q.sizes()), efficient.statistic(std::get<1>(result))};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dout_in, const Tensor& q_in, const Tensor& k_in,
                                                      const Tensor& v_in, const Tensor& out_in, const Tensor& lse,
                                                      at::IntArrayRef row_starts, double scale, bool deterministic,
                                                      int64_t window) {
  check_attention_backward("attention_backward", dout_in, q_in, k_in, v_in, out_in, lse, row_starts);
  gpu::float_type("attention_backward", q_in);
  const gpu::Launch launch(q_in);
  const Tensor q = dense_heads(q_in), k = dense_heads(k_in), v = dense_heads(v_in);
  const Tensor dout = dense_heads(dout_in), out = dense_heads(out_in);
  if (q.size(0) == 0) return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  const RowLayout layout(row_starts);
  const int64_t heads = q.size(1);
  const Deterministic order(is_deterministic(deterministic));
  const Window slide(window, layout.longest);
  switch (choose(q, layout, is_deterministic(deterministic), window)) {
    case Kernel::kCudnn: {
      const Tensor statistic =
          lse.contiguous().view({heads, layout.rows, layout.longest}).transpose(0, 1).contiguous().unsqueeze(-1);
      const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
          heads_first(dout, layout), heads_first(q, layout), heads_first(k, layout), heads_first(v, layout),
          heads_first(out, layout), statistic, no_random_state(q), no_random_state(q), /*attn_bias=*/Tensor(), Tensor(), Tensor(),
          layout.longest, layout.longest, 0.0, true, scale);
      return {dq.transpose(1, 2).reshape(q.sizes()), dk.transpose(1, 2).reshape(k.sizes()), dv.transpose(1, 2).reshape(v.sizes())};
    }
    case Kernel::kFlash: {
      if (layout.equal) {
        const Tensor statistic = lse.contiguous().view({heads, layout.rows, layout.longest}).transpose(0, 1).contiguous();
        const auto [dq, dk, dv] =
            at::_flash_attention_backward(batched(dout, layout), batched(q, layout), batched(k, layout), batched(v, layout),
                                          batched(out, layout), statistic, Tensor(), Tensor(), layout.longest, layout.longest, 0.0,
                                          true, no_random_state(q), no_random_state(q), scale, slide.left);
        return {dq.reshape(q.sizes()), dk.reshape(k.sizes()), dv.reshape(v.sizes())};
      }
      const Tensor cu_seqlens = rows_on_device(layout, q.device()).cu_seqlens;
      return at::_flash_attention_backward(dout, q, k, v, out, lse.contiguous(), cu_seqlens, cu_seqlens, layout.longest,
                                           layout.longest, 0.0, true, no_random_state(q), no_random_state(q), scale, slide.left);
    }
    case Kernel::kEfficient:
      break;
  }
  const Efficient efficient(q, layout);
  const auto [dq, dk, dv, bias] = at::_efficient_attention_backward(
      efficient.batch(dout), efficient.batch(q), efficient.batch(expanded(k, heads)), efficient.batch(expanded(v, heads)),
      std::nullopt, efficient.batch(out), efficient.cu_seqlens, efficient.cu_seqlens, layout.longest, layout.longest,
      efficient.padded(lse.contiguous()), 0.0, no_random_state(q), no_random_state(q), kCausalFromStart, false, scale, std::nullopt,
      slide.size);
  return {dq.reshape(q.sizes()), summed(dk.reshape({k.size(0), heads, k.size(2)}), k.size(1)),
          summed(dv.reshape({v.size(0), heads, v.size(2)}), v.size(1))};
}

/// A row at a time: generation has one, or few.
Tensor attention_with_cache(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, at::IntArrayRef row_starts,
                            at::IntArrayRef cache_starts, at::IntArrayRef cache_lengths, double scale, int64_t window,
                            at::IntArrayRef shared_starts, at::IntArrayRef shared_lengths) {
  const CachedRows rows{cache_starts, cache_lengths, shared_starts, shared_lengths};
  check_attention_with_cache("attention_with_cache", q_in, k_in, v_in, row_starts, rows);
  gpu::float_type("attention_with_cache", q_in);
  const gpu::Launch launch(q_in);
  const Tensor q = dense_heads(q_in), k = dense_heads(k_in), v = dense_heads(v_in);
  const bool flash = choose(q, RowLayout({0, 1}), false, 0) == Kernel::kFlash;
  std::vector<Tensor> parts;
  for (size_t r = 0; r < cache_starts.size(); ++r) {
    const int64_t queries = row_starts[r + 1] - row_starts[r];
    if (queries == 0) continue;
    const int64_t first = window > 0 ? std::max<int64_t>(0, cache_lengths[r] - queries - window + 1) : 0;  // that any query sees
    const int64_t keys = cache_lengths[r] - first;
    const Window slide(window, keys);
    const Tensor asked = q.narrow(0, row_starts[r], queries).unsqueeze(0);
    Tensor key = rows.slots(k, r, first, cache_lengths[r]), value = rows.slots(v, r, first, cache_lengths[r]);
    if (flash) {
      parts.push_back(
          std::get<0>(at::_flash_attention_forward(asked, key.unsqueeze(0), value.unsqueeze(0), std::nullopt, std::nullopt, queries,
                                                   keys, 0.0, queries > 1, false, scale, slide.left))
              .squeeze(0));
    } else {
      key = expanded(key, q.size(1)), value = expanded(value, q.size(1));
      parts.push_back(std::get<0>(at::_efficient_attention_forward(asked, key.unsqueeze(0), value.unsqueeze(0), std::nullopt,
                                                                   std::nullopt, std::nullopt, queries, keys, 0.0, kCausalToEnd,
                                                                   false, scale, std::nullopt, slide.size))
                          .squeeze(0));
    }
  }
  if (parts.size() == 1) return parts.front();
  return parts.empty() ? at::empty(q.sizes(), q.options()) : at::cat(parts);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
  m.impl("attention_with_cache", attention_with_cache);
}

}  // namespace qlorapp::ops
