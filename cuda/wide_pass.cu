// SPDX-License-Identifier: Apache-2.0
#include "wide_pass.hpp"

#include <algorithm>

#include "pass_formulas.cuh"
#include "wide_beside.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kEndThreads = 256, kMostThreads = 1024, kFour = 4;  // columns of a thread at a time

/// What follows a product.
struct End {
  Work work;
  PassPhase phase;
  DecodePass pass;
  unsigned char* next;  ///< WideMemory::next
  bool has_sums;        ///< Of a product; else x is read.
};

__device__ __forceinline__ uint2 words_of(const float (&v)[kFour]) {
  return make_uint2(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]));
}
__device__ __forceinline__ void load_four(const void* from, int64_t at, float (&v)[kFour]) {
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const T*>(from) + at);
  v[0] = __uint_as_float(words.x << 16), v[1] = __uint_as_float(words.x & 0xFFFF'0000U);
  v[2] = __uint_as_float(words.y << 16), v[3] = __uint_as_float(words.y & 0xFFFF'0000U);
}
__device__ __forceinline__ void store_four(void* to, int64_t at, const float (&v)[kFour]) {
  *reinterpret_cast<uint2*>(static_cast<T*>(to) + at) = words_of(v);
}

/// Four results of a product, rounded.
template <int kTokens>
__device__ __forceinline__ void results_of(const End& end, const Parts& parts, int own, uint32_t row, uint32_t token,
                                           float (&v)[kFour]) {
  const Work& work = end.work;
  const uint32_t column = static_cast<uint32_t>(work.first_row[own]) + row;
  float sums[kFour] = {}, bias[kFour] = {};
  if (work.asked.bias != nullptr) load_four(work.asked.bias, column, bias);
  parts.add<kPartsAtOnce<kTokens>>(static_cast<uint32_t>(work.first_strip[own]) + row / kHeight, token, column, kFour, sums);
#pragma unroll
  for (int i = 0; i < kFour; ++i) v[i] = rounded<T>(sums[i] + bias[i]);
}

/// h = act(gate) · up, rows of which x has none 0.
template <int kTokens>
__global__ void __launch_bounds__(kEndThreads) end_gated(const __grid_constant__ End end) {
  const PassPhase& phase = end.phase;
  const auto column = static_cast<int>((blockIdx.x * kEndThreads + threadIdx.x) * kFour), token = static_cast<int>(blockIdx.y);
  const Parts parts(end.work);
  wait_for_earlier_kernels();
  if (column >= phase.width) return;
  float gate[kFour] = {}, up[kFour];
  if (token < end.pass.m) {
    results_of<kTokens>(end, parts, 0, column, token, gate);
    results_of<kTokens>(end, parts, 1, column, token, up);
#pragma unroll
    for (int i = 0; i < kFour; ++i) gate[i] = activated(phase.activation, gate[i], up[i]);
    store_four(phase.y, static_cast<int64_t>(token) * phase.width + column, gate);
  }
  lay_four<kTokens>(end.next, token, column, words_of(gate));
}

/// Heads of a product of queries, keys and values: a warp each. Queries go to y, the others to the cache.
template <int kDim>
__global__ void __launch_bounds__(kEndThreads) end_in_heads(const __grid_constant__ End end) {
  __shared__ float scratch[kEndThreads / 32][kDim];
  const DecodePass& pass = end.pass;
  const PassPhase& phase = end.phase;
  const int all = pass.heads + 2 * pass.kv_heads, dim = pass.head_dim, lane = static_cast<int>(threadIdx.x % 32U);
  const auto warp = static_cast<int>(threadIdx.x / 32U), unit = static_cast<int>(blockIdx.x) * (kEndThreads / 32) + warp;
  const int token = unit / all, head = unit % all;
  const Parts parts(end.work);
  wait_for_earlier_kernels();
  if (token >= pass.m) return;
  const auto value_of = [&](int i) {
    const auto column = static_cast<uint32_t>(head * dim + i);
    int own = 0;
#pragma unroll
    for (int next = 1; next < GemmFourBitGroup::kMostWeights; ++next)
      own += next < end.work.asked.count && column >= end.work.first_row[next] ? 1 : 0;
    const uint32_t strip =
        static_cast<uint32_t>(end.work.first_strip[own]) + (column - static_cast<uint32_t>(end.work.first_row[own])) / kHeight;
    const float bias = end.work.asked.bias == nullptr ? 0.0F : to_float(static_cast<const T*>(end.work.asked.bias)[column]);
    return rounded<T>(parts.of(strip, token, column) + bias);
  };
  const int64_t position = pass.positions[token], slot = pass.slots[token];
  const auto of_cache = [&](void* cache, int kv_head) { return static_cast<T*>(cache) + (slot * pass.kv_heads + kv_head) * dim; };
  const int kv_head = head - pass.heads;
  if (kv_head >= pass.kv_heads) {
    T* const to = of_cache(phase.values, kv_head - pass.kv_heads);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
      if (lane + 32 * i < dim) to[lane + 32 * i] = from_float<T>(value_of(lane + 32 * i));
    return;
  }
  T* const to = kv_head < 0 ? static_cast<T*>(end.work.asked.y) + token * end.work.asked.y_stride + head * dim
                            : of_cache(phase.keys, kv_head);
  prepare_head_of<kDim>(pass, phase, lane, value_of, kv_head < 0 ? phase.q_norm : phase.k_norm, position, scratch[warp], to);
}

/// stream += factor · result, normed where there is a norm of it; then its own norm. A CTA a row, whose threads have kTimes times four columns.
template <int kTokens, int kTimes>
__global__ void __launch_bounds__(kMostThreads) end_in_stream(const __grid_constant__ End end) {
  const PassPhase& phase = end.phase;
  const auto token = static_cast<int>(blockIdx.x);
  const int64_t first = static_cast<int64_t>(token) * phase.width;
  const auto each = [&](const auto& run) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const auto column = static_cast<int>(threadIdx.x + i * blockDim.x) * kFour;
      if (column < phase.width) run(i, column);
    }
  };
  const auto rstd_of = [&](const float(&v)[kTimes][kFour]) {
    float squares = 0.0F;
    each([&](int i, int) {
#pragma unroll
      for (const float one : v[i]) squares = fmaf(one, one, squares);
    });
    const float mean = __fdiv_rn(across_block<Sum>(squares, 0.0F), static_cast<float>(phase.width));
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, phase.eps)));
  };
  const auto norm = [&](const float(&v)[kTimes][kFour], const void* weights, float(&to)[kTimes][kFour]) {
    const float rstd = rstd_of(v);
    each([&](int i, int column) {
      float weight[kFour];
      load_four(weights, column, weight);
#pragma unroll
      for (int j = 0; j < kFour; ++j) to[i][j] = normed_by(end.pass.norm_rule, v[i][j] * rstd, weight[j]);
    });
  };
  const Parts parts(end.work);
  wait_for_earlier_kernels();
  if (token >= end.pass.m) {  // rows that x has not are 0
    each([&](int, int column) { lay_four<kTokens>(end.next, token, column, make_uint2(0, 0)); });
    return;
  }
  float stream[kTimes][kFour], added[kTimes][kFour];
  const bool adds = end.has_sums || phase.x != nullptr;
  each([&](int i, int column) {
    load_four(phase.stream, first + column, stream[i]);
    if (end.has_sums) results_of<kTokens>(end, parts, 0, column, token, added[i]);
    else if (adds) load_four(phase.x, first + column, added[i]);
  });
  if (phase.norm != nullptr) norm(added, phase.norm, added);
  if (adds) {
    each([&](int i, int column) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        const float value = phase.factor == 1.0F ? added[i][j] : rounded<T>(added[i][j] * phase.factor);
        stream[i][j] = rounded<T>(stream[i][j] + value);
      }
      store_four(phase.stream, first + column, stream[i]);
    });
  }
  if (phase.next_x == nullptr) return;
  if (phase.next_norm != nullptr) norm(stream, phase.next_norm, stream);
  each([&](int i, int column) {
    store_four(phase.next_x, first + column, stream[i]);
    lay_four<kTokens>(end.next, token, column, words_of(stream[i]));
  });
}

GemmFourBitGroup group_of(const DecodePass& pass, const PassPhase& phase, float* partial) {
  GemmFourBitGroup group{.x = phase.x,
                         .x_stride = phase.k,
                         .y = phase.y,
                         .y_stride = phase.width,
                         .type = Float::kBFloat16,
                         .m = pass.m,
                         .k = phase.k,
                         .weights = {},
                         .count = phase.count,
                         .a = phase.a,
                         .u = pass.u,
                         .ranks = phase.ranks,
                         .counters = nullptr,
                         .bias = phase.bias,
                         .nested_block_size = pass.nested_block_size,
                         .quant_type = pass.quant_type,
                         .partial = partial};
  for (int i = 0; i < phase.count; ++i) {
    const PassWeight& from = phase.weights[i];
    group.weights[i] = {.packed = from.packed,
                        .absmax = from.absmax,
                        .nested_absmax = from.nested_absmax,
                        .nested_offset = from.nested_offset,
                        .n = from.n,
                        .b = from.b,
                        .rank = from.rank,
                        .u_column = from.u_column,
                        .scaling = from.scaling};
  }
  return group;
}

cudaError_t launch_stream(const End& end, Stream stream) {
  return with_tokens(end.pass.m, [&](auto tokens) {
    constexpr int kTokens = decltype(tokens)::value;
    const int columns = end.phase.width / kFour, times = (columns + kMostThreads - 1) / kMostThreads;
    const int threads = ((columns + times - 1) / times + 31) / 32 * 32;
    const dim3 grid(static_cast<unsigned>(end.next == nullptr ? end.pass.m : kTokens));
    const auto launch = [&](auto of) {
      return launch_early<end_in_stream<kTokens, decltype(of)::value>>(grid, static_cast<unsigned>(threads), 0, stream, end);
    };
    if (times == 1) return launch(std::integral_constant<int, 1>());
    if (times == 2) return launch(std::integral_constant<int, 2>());
    return times <= 4 ? launch(std::integral_constant<int, 4>()) : cudaErrorInvalidValue;
  });
}

cudaError_t launch_heads(const End& end, Stream stream) {
  const int units = end.pass.m * (end.pass.heads + 2 * end.pass.kv_heads), each = kEndThreads / 32;
  const dim3 grid(static_cast<unsigned>((units + each - 1) / each));
  if (end.pass.head_dim <= 64) return launch_early<end_in_heads<64>>(grid, kEndThreads, 0, stream, end);
  if (end.pass.head_dim <= 128) return launch_early<end_in_heads<128>>(grid, kEndThreads, 0, stream, end);
  return launch_early<end_in_heads<256>>(grid, kEndThreads, 0, stream, end);
}

}  // namespace

bool has_wide_pass(const DecodePass& pass, const PassPhase& product) {
  constexpr int kMostColumns = 4 * kMostThreads * kFour;  // of the stream
  return pass.m <= 128 && pass.head_dim % 8 == 0 && pass.head_dim <= 256 &&
         (product.stream == nullptr || product.width <= kMostColumns) && product.width % kFour == 0 &&
         goes_wide(group_of(pass, product, nullptr));
}

int64_t wide_floats(const DecodePass& pass, const PassPhase& product, int multiprocessors) {
  return wide_sums_floats(group_of(pass, product, nullptr), multiprocessors);
}

int64_t wide_laid_bytes(int64_t m, int64_t k) { return laid_bytes_of(m, k); }

cudaError_t wide_product(const DecodePass& pass, const PassPhase& product, const PassPhase* attention, const WideMemory& memory,
                         int multiprocessors, Stream stream) {
  const GemmFourBitGroup group = group_of(pass, product, memory.partial);
  if (const cudaError_t error = sum_wide_rows(group, memory.laid, memory.is_laid, multiprocessors, stream); error != cudaSuccess)
    return error;
  End end{.work = work_of(group, kHeight), .phase = product, .pass = pass, .next = memory.next, .has_sums = true};
  end.work.splits = multiprocessors;
  if (attention != nullptr) {
    end.phase = *attention;
    return launch_heads(end, stream);
  }
  if (product.gated) {
    return with_tokens(pass.m, [&](auto tokens) {
      constexpr int kTokens = decltype(tokens)::value;
      const auto columns = static_cast<unsigned>(product.width / kFour);
      return launch_early<end_gated<kTokens>>(dim3((columns + kEndThreads - 1) / kEndThreads, kTokens), kEndThreads, 0, stream,
                                              end);
    });
  }
  if (product.stream != nullptr) return launch_stream(end, stream);
  return with_tokens(pass.m, [&](auto tokens) { return launch_finish<T, decltype(tokens)::value>(end.work, stream); });
}

cudaError_t wide_sum(const DecodePass& pass, const PassPhase& phase, unsigned char* next, Stream stream) {
  return launch_stream(
      {.work = work_of(group_of(pass, phase, nullptr), kHeight), .phase = phase, .pass = pass, .next = next, .has_sums = false},
      stream);
}

}  // namespace qlorapp::cuda
