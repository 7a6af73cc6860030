// SPDX-License-Identifier: Apache-2.0
/// The part of decode_attention_kernel.hpp that the instruction sets share; included by each of them, in an unnamed namespace as
/// float_bits.hpp is.
///
/// A policy names its registers and what is done with them:
///     Vector, kLanes                a register of kLanes floats
///     zero(), all(x), store(to, v)  x in each lane
///     add(sum, a, b)                sum + a · b
///     load(x)                       kLanes elements of any type, as floats
///     totals(v)                     lane i: the sum of the lanes of v[i], for kLanes registers
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "decode_attention_kernel.hpp"
#include "float_bits.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// How many keys ahead memory is fetched.
constexpr int64_t kKeysAhead = 16;

inline void fetch(const void* row, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(static_cast<const char*>(row) + line, _MM_HINT_T0);
}

/// Scores of `queries` queries from `first` on, with keys [from, count) taken so many at a time that all sums fill one register.
template <class Policy, class T, int queries>
void score_queries(const CachedHead& head, int64_t first) {
  using Vector = typename Policy::Vector;
  constexpr int kKeys = static_cast<int>(Policy::kLanes) / queries;
  const auto* const keys = static_cast<const T*>(head.keys);
  const float* const q = head.q + first * head.head_dim;
  for (int64_t l = 0; l < head.count; l += kKeys) {
    const T* key[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      const int64_t at = l + j < head.count ? l + j : head.count - 1;
      key[j] = keys + at * head.key_stride;
      if (at + kKeysAhead < head.count)
        fetch(key[j] + kKeysAhead * head.key_stride, head.head_dim * static_cast<int64_t>(sizeof(T)));
    }
    Vector sum[queries * kKeys];
    for (Vector& one : sum) one = Policy::zero();
    for (int64_t i = 0; i < head.head_dim; i += Policy::kLanes) {
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const Vector of_key = Policy::load(key[j] + i);
#pragma GCC unroll 4
        for (int g = 0; g < queries; ++g)
          sum[g * kKeys + j] = Policy::add(sum[g * kKeys + j], of_key, Policy::load(q + g * head.head_dim + i));
      }
    }
    alignas(64) float totals[Policy::kLanes];
    Policy::store(totals, Policy::totals(sum));
    const int64_t left = head.count - l < kKeys ? head.count - l : kKeys;
    for (int g = 0; g < queries; ++g)
      for (int64_t j = 0; j < left; ++j) head.scores[(first + g) * head.score_stride + l + j] = totals[g * kKeys + j];
  }
}

/// Elements [begin, begin + width · kLanes) of the sums of `queries` queries from `first` on.
template <class Policy, class T, int queries, int width>
void sum_queries(const CachedHead& head, int64_t first, int64_t begin) {
  using Vector = typename Policy::Vector;
  const auto* const values = static_cast<const T*>(head.values) + begin;
  const float* const weights = head.scores + first * head.score_stride;
  float* const attended = head.attended + first * head.head_dim + begin;
  Vector sum[queries][width];
  for (int g = 0; g < queries; ++g)
    for (int i = 0; i < width; ++i) sum[g][i] = Policy::load(attended + g * head.head_dim + i * Policy::kLanes);
  for (int64_t l = 0; l < head.count; ++l) {
    const T* const value = values + l * head.value_stride;
    if (l + kKeysAhead < head.count)
      fetch(value + kKeysAhead * head.value_stride, width * Policy::kLanes * static_cast<int64_t>(sizeof(T)));
    Vector of_value[width];
#pragma GCC unroll 4
    for (int i = 0; i < width; ++i) of_value[i] = Policy::load(value + i * Policy::kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < queries; ++g) {
      const Vector weight = Policy::all(weights[g * head.score_stride + l]);
#pragma GCC unroll 4
      for (int i = 0; i < width; ++i) sum[g][i] = Policy::add(sum[g][i], of_value[i], weight);
    }
  }
  for (int g = 0; g < queries; ++g)
    for (int i = 0; i < width; ++i) Policy::store(attended + g * head.head_dim + i * Policy::kLanes, sum[g][i]);
}

template <class Policy, class T, int queries>
void sum_queries(const CachedHead& head, int64_t first) {
  constexpr int kWidth = Policy::kWidth;
  int64_t begin = 0;
  for (; begin + kWidth * Policy::kLanes <= head.head_dim; begin += kWidth * Policy::kLanes)
    sum_queries<Policy, T, queries, kWidth>(head, first, begin);
  for (; begin < head.head_dim; begin += Policy::kLanes) sum_queries<Policy, T, queries, 1>(head, first, begin);
}

/// Calls part.operator()<n>(first) for all queries, n of them at once: four, then two, then one.
template <class Part>
void for_queries(int64_t queries, const Part& part) {
  int64_t first = 0;
  for (; first + 4 <= queries; first += 4) part.template operator()<4>(first);
  for (; first + 2 <= queries; first += 2) part.template operator()<2>(first);
  for (; first < queries; ++first) part.template operator()<1>(first);
}

template <class Policy, class T>
void score(const CachedHead& head) {
  for_queries(head.queries, [&]<int n>(int64_t first) { score_queries<Policy, T, n>(head, first); });
}

template <class Policy, class T>
void sum(const CachedHead& head) {
  for_queries(head.queries, [&]<int n>(int64_t first) { sum_queries<Policy, T, n>(head, first); });
}

template <class Policy>
DecodeAttentionKernel decode_attention_of(DenseType type) {
  if (type == DenseType::kFloat16) return {score<Policy, Float16>, sum<Policy, Float16>};
  if (type == DenseType::kBFloat16) return {score<Policy, BFloat16>, sum<Policy, BFloat16>};
  return {score<Policy, float>, sum<Policy, float>};
}

}  // namespace
}  // namespace qlorapp::ops::cpu
