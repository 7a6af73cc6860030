// SPDX-License-Identifier: Apache-2.0
// One row of a norm, forward and backward, in each of its rules (ops/norm.hpp).
#pragma once

#include <cmath>
#include <cstdint>

#include "qlorapp/format/family.hpp"
#include "simd.hpp"

namespace qlorapp::ops::cpu {

using format::NormRule;
using simd::accumulate_t;
using simd::narrow;
using simd::rounded;
using simd::widen;

/// Single precision within 512 elements, double across: as exact as one rounding at the end, at vector speed.
template <class A, class Term>
double blocked_sum(int64_t n, const Term& term) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 512) {
    const int64_t end = std::min<int64_t>(n, begin + 512);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += term(i);
    total += static_cast<double>(sum);
  }
  return total;
}

/// By what a normalized element is multiplied.
template <NormRule rule, class T>
accumulate_t<T> factor_of(T weight) {
  using A = accumulate_t<T>;
  return rule == NormRule::kOnePlus ? A{1} + widen(weight) : widen(weight);
}

/// A value where y is rounded twice, and unrounded where once.
template <NormRule rule, class T>
accumulate_t<T> inner(accumulate_t<T> value) {
  return rule == NormRule::kRoundTwice ? rounded<T>(value) : value;
}

template <NormRule rule, class T>
void scale_row(const T* x, const T* weight, accumulate_t<T> rstd, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = narrow<T>(inner<rule, T>(widen(x[i]) * rstd) * factor_of<rule>(weight[i]));
}

template <class T>
accumulate_t<T> rstd_of_row(const T* x, int64_t n, double eps) {
  using A = accumulate_t<T>;
  const double squares = blocked_sum<A>(n, [&](int64_t i) { return widen(x[i]) * widen(x[i]); });
  const A mean = static_cast<A>(squares / static_cast<double>(n));
  return A{1} / std::sqrt(mean + static_cast<A>(eps));
}

template <NormRule rule, class T>
accumulate_t<T> normalize_row(const T* x, const T* weight, T* y, int64_t n, double eps) {
  const accumulate_t<T> rstd = rstd_of_row(x, n, eps);
  scale_row<rule>(x, weight, rstd, y, n);
  return rstd;
}

/// dx = rstd·(g − x̂·mean(g·x̂)) with g = dy·weight and x̂ = x·rstd. `add`: dx += that, after its own rounding.
template <NormRule rule, bool add, class T>
void normalize_row_backward(const T* dy, const T* x, const T* weight, accumulate_t<T> rstd, T* dx, int64_t n) {
  using A = accumulate_t<T>;
  const double dot =
      blocked_sum<A>(n, [&](int64_t i) { return inner<rule, T>(widen(dy[i]) * factor_of<rule>(weight[i])) * widen(x[i]); });
  const A slope = static_cast<A>(dot / static_cast<double>(n)) * rstd * rstd * rstd;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A g = inner<rule, T>(widen(dy[i]) * factor_of<rule>(weight[i])) * rstd - slope * widen(x[i]);
    dx[i] = narrow<T>(add ? widen(dx[i]) + rounded<T>(g) : g);
  }
}

/// f.operator()<rule>() of a rule that is known when it runs.
template <class F>
void with_rule(NormRule rule, const F& f) {
  switch (rule) {
    case NormRule::kRoundTwice:
      return f.template operator()<NormRule::kRoundTwice>();
    case NormRule::kRoundOnce:
      return f.template operator()<NormRule::kRoundOnce>();
    case NormRule::kOnePlus:
      return f.template operator()<NormRule::kOnePlus>();
  }
}

}  // namespace qlorapp::ops::cpu
