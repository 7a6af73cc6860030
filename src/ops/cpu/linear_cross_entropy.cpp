// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "gemm.hpp"
#include "rows.hpp"

namespace qlorapp::ops {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::widen;

/// cap·tanh(z·factor / cap) = cap·(1 − 2 / (1 + e^(2·z·factor / cap))).
template <class A>
A shaped(A z, A factor, A cap) {
  return cap == 0 ? z * factor : cap * (A{1} - A{2} / (A{1} + simd::exp(z * factor * (A{2} / cap))));
}

struct RowResult {
  double loss = 0, entropy = 0;
  bool is_top = false;
};

/// Loss −log softmax(logits)[target] and statistics of one row, in the accumulate type. With `gradient`, (softmax − onehot)·scale
/// replaces the logits. `row` holds n elements of scratch: the widened logits, then their exponentials.
/// @tparam plain  logits are the products as they are.
template <class T, bool gradient, bool plain>
RowResult row_loss(T* logits, accumulate_t<T>* row, int64_t n, int64_t target, accumulate_t<T> scale, accumulate_t<T> factor,
                   accumulate_t<T> cap) {
  using A = accumulate_t<T>;
  A highest = -INFINITY;
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < n; ++i) {
    row[i] = plain ? widen(logits[i]) : shaped<A>(widen(logits[i]), factor, cap);
    highest = row[i] > highest ? row[i] : highest;
  }
  const A at_target = row[target];
  const bool is_top = at_target >= highest && std::find(row, row + target, highest) == row + target;
  double total = 0.0, weighted = 0.0;  // of e^d and e^d·d, where d = logit − highest
  for (int64_t begin = 0; begin < n; begin += 1024) {
    const int64_t end = std::min<int64_t>(n, begin + 1024);
    A sum = 0, sum_weighted = 0;
#pragma omp simd reduction(+ : sum, sum_weighted)
    for (int64_t i = begin; i < end; ++i) {
      const A d = row[i] - highest;
      row[i] = simd::exp(d);
      sum += row[i];
      sum_weighted += row[i] * d;
    }
    total += static_cast<double>(sum);
    weighted += static_cast<double>(sum_weighted);
  }
  if constexpr (gradient) {
    const A inverse = static_cast<A>(1.0 / total);
    const A of_target = (row[target] * inverse - A{1}) * scale;
    const auto slope_at = [&](int64_t i) {
      const A t = cap == 0 ? A{0} : shaped<A>(widen(logits[i]), factor, cap) / cap;
      return plain ? A{1} : factor * (A{1} - t * t);
    };
    const A slope_of_target = slope_at(target);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
      logits[i] = narrow<T>(plain ? row[i] * inverse * scale : row[i] * inverse * scale * slope_at(i));
    logits[target] = narrow<T>(of_target * slope_of_target);
  }
  const double log_total = std::log(total);
  return {log_total + static_cast<double>(highest) - static_cast<double>(at_target), log_total - weighted / total, is_top};
}

/// Results of a chunk's rows; its logits become their gradient if that is asked for.
template <bool gradient, bool plain>
void chunk_loss(const at::Tensor& logits, const int64_t* targets, RowResult* results, double scale, LogitRule rule) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, logits.scalar_type(), "linear_cross_entropy", [&] {
    using A = accumulate_t<scalar_t>;
    auto* p = logits.mutable_data_ptr<scalar_t>();
    const int64_t n = logits.size(1);
    at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
      std::vector<A> scratch(static_cast<size_t>(n));
      simd::vectorized([&, row = scratch.data()] {
        for (int64_t r = begin; r < end; ++r) {
          results[r] = row_loss<scalar_t, gradient, plain>(p + r * n, row, n, targets[r], static_cast<A>(scale),
                                                           static_cast<A>(rule.factor), static_cast<A>(rule.cap));
        }
      });
    });
  });
}

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                                        const at::Tensor& targets, const std::optional<at::Tensor>& grad_scale,
                                                        bool need_gradient, int64_t chunk_rows, int64_t target_count, double factor,
                                                        double cap, const std::optional<at::Tensor>& statistics) {
  check_linear_cross_entropy("linear_cross_entropy", hidden, weight, targets, grad_scale, statistics, chunk_rows);
  const LogitRule rule = logit_rule(factor, cap);
  const int64_t vocabulary = weight.size(0), all_rows = hidden.size(0);

  // Only rows with a target are computed.
  const at::Tensor all_targets = targets.contiguous();
  const auto* target = all_targets.const_data_ptr<int64_t>();
  std::vector<int64_t> rows, labels;
  for (int64_t r = 0; r < all_rows; ++r) {
    if (target[r] < 0) continue;
    TORCH_CHECK_VALUE(target[r] < vocabulary, "[linear_cross_entropy] targets must be below the vocabulary size ", vocabulary,
                      "; got ", target[r], " at index ", r,
                      ". Use the tokenizer of this model, or a negative target to ignore a row.");
    rows.push_back(r);
    labels.push_back(target[r]);
  }
  const auto count = static_cast<int64_t>(rows.size());
  TORCH_CHECK_VALUE(target_count < 0 || target_count == count,
                    "[linear_cross_entropy] target_count must be the number of targets >= 0, ", count, "; got ", target_count,
                    ". Count again, or leave it out.");
  const bool everything = count == all_rows;
  const double scale = grad_scale.has_value() && grad_scale->defined() ? grad_scale->item<double>() : 1.0;
  at::Tensor gradient = !need_gradient ? at::empty({0}, hidden.options())
                        : everything   ? at::empty_like(hidden, at::MemoryFormat::Contiguous)
                                       : at::zeros_like(hidden, at::MemoryFormat::Contiguous);

  const int64_t chunk = std::min(chunk_rows, count);
  const at::Tensor logits_buffer = at::empty({chunk, vocabulary}, hidden.options());
  const at::Tensor index = everything ? at::Tensor() : at::from_blob(rows.data(), {count}, all_targets.options());
  std::vector<RowResult> results(rows.size());
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t size = std::min(chunk, count - begin);
    const at::Tensor chunk_index = everything ? at::Tensor() : index.narrow(0, begin, size);
    const at::Tensor h = everything ? hidden.narrow(0, begin, size) : at::index_select(hidden, 0, chunk_index);
    const at::Tensor logits = logits_buffer.narrow(0, 0, size);
    cpu::multiply_transposed(logits, h, weight);
    const auto form = [&](auto gradient_wanted, auto plain) {
      chunk_loss<gradient_wanted, plain>(logits, labels.data() + begin, results.data() + begin, scale, rule);
    };
    using std::bool_constant;
    if (need_gradient)
      rule.is_plain() ? form(bool_constant<true>(), bool_constant<true>()) : form(bool_constant<true>(), bool_constant<false>());
    else
      rule.is_plain() ? form(bool_constant<false>(), bool_constant<true>()) : form(bool_constant<false>(), bool_constant<false>());
    if (!need_gradient) continue;
    if (everything) {
      cpu::multiply(gradient.narrow(0, begin, size), logits, weight);
    } else {
      const at::Tensor compact = at::empty({size, hidden.size(1)}, hidden.options());
      cpu::multiply(compact, logits, weight);
      gradient.index_copy_(0, chunk_index, compact);
    }
  }
  double loss = 0.0, entropy = 0.0;
  int64_t correct = 0;
  for (const RowResult& row : results) {
    loss += row.loss;
    entropy += row.entropy;
    correct += row.is_top ? 1 : 0;
  }
  if (statistics) {
    statistics->select(0, 0).add_(entropy);
    statistics->select(0, 1).add_(correct);
  }
  return {at::full({}, loss, hidden.options().dtype(accumulate_type(hidden))), gradient};
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { m.impl("linear_cross_entropy", linear_cross_entropy); }

}  // namespace qlorapp::ops
