// SPDX-License-Identifier: Apache-2.0
#include "decode_attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "decode_attention_kernel.hpp"
#include "four_bit_work.hpp"
#include "simd.hpp"

namespace qlorapp::ops::cpu {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::widen;

/// Multiplications that are worth a thread.
constexpr int64_t kAttentionGrain = int64_t{1} << 14;

/// Queries of one row that share a head of keys and values, which lie in one place or in two.
template <class T>
struct Shared {
  struct Run {
    const T *k, *v;
    int64_t count;
  };
  const T* q;
  std::array<Run, 2> runs;
  T* out;
  int64_t queries, q_stride, out_stride, k_stride, v_stride, keys, d;
  accumulate_t<T> scale;
};

/// scores = q · keysᵀ, where no kernel takes it.
template <class T>
void score(const Shared<T>& work, const typename Shared<T>::Run& run, const accumulate_t<T>* q, accumulate_t<T>* wide,
           accumulate_t<T>* scores) {
  for (int64_t l = 0; l < run.count; ++l) {
    const T* const key = run.k + l * work.k_stride;
#pragma omp simd
    for (int64_t i = 0; i < work.d; ++i) wide[i] = widen(key[i]);
    for (int64_t g = 0; g < work.queries; ++g) {
      const auto* const own = q + g * work.d;
      accumulate_t<T> sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < work.d; ++i) sum += own[i] * wide[i];
      scores[g * work.keys + l] = sum;
    }
  }
}

/// sums += scores · values, where no kernel takes it.
template <class T>
void sum_up(const Shared<T>& work, const typename Shared<T>::Run& run, const accumulate_t<T>* scores, accumulate_t<T>* wide,
            accumulate_t<T>* sums) {
  for (int64_t l = 0; l < run.count; ++l) {
    const T* const value = run.v + l * work.v_stride;
#pragma omp simd
    for (int64_t i = 0; i < work.d; ++i) wide[i] = widen(value[i]);
    for (int64_t g = 0; g < work.queries; ++g) {
      const auto weight = scores[g * work.keys + l];
      auto* const own = sums + g * work.d;
#pragma omp simd
      for (int64_t i = 0; i < work.d; ++i) own[i] += weight * wide[i];
    }
  }
}

template <class A>
void softmax(A* row, int64_t count) {
  A largest = row[0], total = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t l = 0; l < count; ++l) largest = row[l] > largest ? row[l] : largest;
#pragma omp simd reduction(+ : total)
  for (int64_t l = 0; l < count; ++l) {
    row[l] = simd::exp(row[l] - largest);
    total += row[l];
  }
  const A inverse = A{1} / total;
#pragma omp simd
  for (int64_t l = 0; l < count; ++l) row[l] *= inverse;
}

/// @param scratch  of scratch_size() elements.
template <class T>
void attend(const Shared<T>& work, const DecodeAttentionKernel& kernel, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  const int64_t queries = work.queries, keys = work.keys, d = work.d;
  A *const q = scratch, *const sums = q + queries * d, *const wide = sums + queries * d, *const scores = wide + d;
  // Scores of the second run stand behind those of the first.
  const auto each_run = [&](const auto& does) {
    A* own = scores;
    for (const typename Shared<T>::Run& run : work.runs) {
      if (run.count > 0) does(run, own);
      own += run.count;
    }
  };
  const auto by_kernel = [&](void (*part)(const CachedHead&)) {
    if constexpr (std::is_same_v<A, float>) {
      each_run([&](const auto& run, float* own) {
        part({run.k, run.v, work.k_stride, work.v_stride, run.count, d, queries, q, own, keys, sums});
      });
    }
  };
  simd::vectorized([&] {
    for (int64_t g = 0; g < queries; ++g) {
#pragma omp simd
      for (int64_t i = 0; i < d; ++i) q[g * d + i] = widen(work.q[g * work.q_stride + i]) * work.scale;
    }
#pragma omp simd
    for (int64_t i = 0; i < queries * d; ++i) sums[i] = 0;
    if (kernel.score == nullptr) each_run([&](const auto& run, A* own) { score(work, run, q, wide, own); });
  });
  if (kernel.score != nullptr) by_kernel(kernel.score);
  simd::vectorized([&] {
    for (int64_t g = 0; g < queries; ++g) softmax(scores + g * keys, keys);
    if (kernel.sum == nullptr) each_run([&](const auto& run, A* own) { sum_up(work, run, own, wide, sums); });
  });
  if (kernel.sum != nullptr) by_kernel(kernel.sum);
  simd::vectorized([&] {
    for (int64_t g = 0; g < queries; ++g) {
#pragma omp simd
      for (int64_t i = 0; i < d; ++i) work.out[g * work.out_stride + i] = narrow<T>(sums[g * d + i]);
    }
  });
}

size_t scratch_size(int64_t queries, int64_t keys, int64_t d) { return static_cast<size_t>(queries * (2 * d + keys) + d); }

}  // namespace

at::Tensor attend_one_query_each(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CachedRows& cached,
                                 double scale, int64_t window) {
  const int64_t rows = q.size(0), heads = q.size(1), kv_heads = k.size(1), d = q.size(2);
  at::Tensor out = at::empty({rows, heads, d}, q.options());
  if (out.numel() == 0) return out;
  // Heads that share keys read them once, if there is work enough for all threads.
  const int64_t group = heads / kv_heads, queries = rows * kv_heads >= at::get_num_threads() ? group : 1;
  const int64_t parts = heads / queries, longest = std::max<int64_t>(1, *std::ranges::max_element(cached.lengths));
  const DecodeAttentionKernel kernel = decode_attention_kernel(cpu_isa(), dense_type_of(q.scalar_type()), d);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, q.scalar_type(), "decode_attention", [&] {
    using A = accumulate_t<scalar_t>;
    const auto *pq = q.const_data_ptr<scalar_t>(), *pk = k.const_data_ptr<scalar_t>(), *pv = v.const_data_ptr<scalar_t>();
    auto* const po = out.mutable_data_ptr<scalar_t>();
    const int64_t grain = std::max<int64_t>(1, kAttentionGrain / (queries * d * longest));
    at::parallel_for(0, rows * parts, grain, [&](int64_t begin, int64_t end) {
      std::vector<A> scratch(scratch_size(queries, longest, d));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / parts, head = i % parts * queries, kv_head = head / group;
        const auto at = static_cast<size_t>(row);
        const int64_t length = cached.lengths[at], seen = window > 0 ? std::min(window, length) : length;
        const auto [common, own] = cached.runs(at, length - seen, length);
        const auto run = [&](const CachedRows::Run& slots) -> typename Shared<scalar_t>::Run {
          if (slots.count == 0) return {nullptr, nullptr, 0};
          return {pk + slots.begin * k.stride(0) + kv_head * k.stride(1), pv + slots.begin * v.stride(0) + kv_head * v.stride(1),
                  slots.count};
        };
        const Shared<scalar_t> work{pq + row * q.stride(0) + head * q.stride(1),
                                    {run(common), run(own)},
                                    po + (row * heads + head) * d,
                                    queries,
                                    q.stride(1),
                                    d,
                                    k.stride(0),
                                    v.stride(0),
                                    seen,
                                    d,
                                    static_cast<A>(scale)};
        attend(work, kernel, scratch.data());
      }
    });
  });
  return out;
}

}  // namespace qlorapp::ops::cpu
