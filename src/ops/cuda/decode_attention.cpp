// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode_attention.hpp"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

using at::Tensor;

bool has_decode_attention(at::ScalarType dtype, int64_t head_dim, int64_t device) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) return false;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device < 0 ? c10::cuda::current_device() : device));
  const cuda::Float type = dtype == at::kHalf ? cuda::Float::kFloat16 : cuda::Float::kBFloat16;
  return cuda::has_decode_attention(type, head_dim, gpu::code_architecture());
}

Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache_starts, const Tensor& cache_lengths,
                        int64_t longest, double scale, int64_t window, const std::optional<Tensor>& shared_starts,
                        const std::optional<Tensor>& shared_lengths) {
  check_decode_attention("decode_attention", q, k, v, cache_starts, cache_lengths, longest, shared_starts, shared_lengths);
  gpu::check_device("decode_attention", "cache_starts", cache_starts, q);
  gpu::check_device("decode_attention", "cache_lengths", cache_lengths, q);
  if (shared_starts) {
    gpu::check_device("decode_attention", "shared_starts", *shared_starts, q);
    gpu::check_device("decode_attention", "shared_lengths", *shared_lengths, q);
  }
  const gpu::Launch launch(q);
  TORCH_CHECK_VALUE(has_decode_attention(q.scalar_type(), q.size(2), q.device().index()),
                    "[decode_attention] on this GPU q must be ", "16 bits of at most 256 elements, a multiple of 8; got ",
                    q.scalar_type(), " ", q.sizes(), ". Use attention_with_cache.");
  const auto packed = [](const Tensor& x) {
    const bool is_aligned = x.stride(2) == 1 && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 &&
                            reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    return is_aligned ? x : x.contiguous();
  };
  const Tensor own_q = packed(q), keys = packed(k), values = packed(v);
  TORCH_CHECK_VALUE(keys.strides() == values.strides(), "[decode_attention] k and v must have the same strides.");
  Tensor out = at::empty(q.sizes(), q.options());
  cuda::DecodeAttention work{.type = gpu::float_type("decode_attention", q),
                             .q = own_q.const_data_ptr(),
                             .k = keys.const_data_ptr(),
                             .v = values.const_data_ptr(),
                             .out = out.mutable_data_ptr(),
                             .partial = nullptr,
                             .starts = cache_starts.const_data_ptr<int64_t>(),
                             .lengths = cache_lengths.const_data_ptr<int64_t>(),
                             .shared_starts = shared_starts ? shared_starts->const_data_ptr<int64_t>() : nullptr,
                             .shared_lengths = shared_lengths ? shared_lengths->const_data_ptr<int64_t>() : nullptr,
                             .q_row_stride = own_q.stride(0),
                             .q_head_stride = own_q.stride(1),
                             .slot_stride = keys.stride(0),
                             .kv_head_stride = keys.stride(1),
                             .rows = q.size(0),
                             .heads = q.size(1),
                             .kv_heads = k.size(1),
                             .head_dim = q.size(2),
                             .window = window,
                             .scale = static_cast<float>(scale)};
  const int64_t keys_at_most = window > 0 ? std::min(window, longest) : longest;
  cuda::divide_keys(work, keys_at_most, at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
  const Tensor partial = at::empty({cuda::decode_partial_floats(work)}, q.options().dtype(at::kFloat));
  work.partial = partial.mutable_data_ptr<float>();
  C10_CUDA_CHECK(cuda::decode_attention(work, launch.stream()));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CompositeExplicitAutograd, m) { m.impl("has_decode_attention", has_decode_attention); }
TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { m.impl("decode_attention", decode_attention); }

}  // namespace qlorapp::ops
