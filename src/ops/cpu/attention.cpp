// SPDX-License-Identifier: Apache-2.0
// Attention of packed rows over LibTorch's fused CPU kernel, which keeps a tile of the scores and never the (T, T) matrix.
//
// The kernel wants (batch, heads, T, d) with as many heads in k and v as in q, in any strides. Grouped heads cost no copy: a
// row is presented as batch = H_kv, heads = H / H_kv, with stride 0 over the heads of k and v. Without grouping the batch
// stands for consecutive rows of equal length. Its output has the memory order of q, so that a single row is returned as it is.
//
// The kernel has no window. Of a row that is longer than one, a panel of queries after the other goes through with the keys that any of
// them sees, and a mask of (panel, keys).
#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "decode_attention.hpp"

namespace qlorapp::ops {
namespace {

/// `rows` consecutive rows of `length` tokens, handed to the kernel at once.
struct Run {
  int64_t start = 0, rows = 1, length = 0;
  [[nodiscard]] int64_t tokens() const { return rows * length; }
};

std::vector<Run> runs_of(at::IntArrayRef row_starts, bool grouped) {
  std::vector<Run> runs;
  for (size_t r = 0; r + 1 < row_starts.size(); ++r) {
    const int64_t length = row_starts[r + 1] - row_starts[r];
    if (length == 0) continue;
    if (!grouped && !runs.empty() && runs.back().length == length) {
      ++runs.back().rows;
    } else {
      runs.push_back({row_starts[r], 1, length});
    }
  }
  return runs;
}

/// How the kernel sees H heads over H_kv: (batch, heads, T, d) views of packed (tokens, H, d) tensors, and back.
struct Heads {
  int64_t kv_heads, group;

  /// Of q, out and their gradients.
  [[nodiscard]] at::Tensor queries(const at::Tensor& x, const Run& run) const {
    const at::Tensor part = x.narrow(0, run.start, run.tokens());
    if (group > 1) return part.unflatten(1, {kv_heads, group}).permute({1, 2, 0, 3});
    return part.unflatten(0, {run.rows, run.length}).permute({0, 2, 1, 3});
  }
  /// Of k and v. `narrow` has been applied when start is 0.
  [[nodiscard]] at::Tensor keys(const at::Tensor& x, const Run& run) const {
    const at::Tensor part = x.narrow(0, run.start, run.tokens());
    if (group > 1) return part.permute({1, 0, 2}).unsqueeze(1).expand({kv_heads, group, run.length, x.size(2)});
    return part.unflatten(0, {run.rows, run.length}).permute({0, 2, 1, 3});
  }
  /// Of lse (H, M): (batch, heads, T).
  [[nodiscard]] at::Tensor statistic(const at::Tensor& lse, const Run& run) const {
    const at::Tensor part = lse.narrow(1, run.start, run.tokens());
    if (group > 1) return part.unflatten(0, {kv_heads, group});
    return part.unflatten(1, {run.rows, run.length}).permute({1, 0, 2});
  }
  /// (batch, heads, T, d) of the kernel, as (tokens, H, d).
  [[nodiscard]] at::Tensor packed(const at::Tensor& x, const Run& run) const {
    const at::Tensor tokens_first = group > 1 ? x.permute({2, 0, 1, 3}) : x.permute({0, 2, 1, 3});
    return tokens_first.reshape({run.tokens(), kv_heads * group, x.size(3)});
  }
  /// A gradient of k or v, summed over the heads that share them: (tokens, H_kv, d).
  [[nodiscard]] at::Tensor packed_keys(const at::Tensor& x, const Run& run) const {
    return group > 1 ? x.sum(1).permute({1, 0, 2}) : packed(x, run);
  }
};

Heads heads_of(const at::Tensor& q, const at::Tensor& k) { return {k.size(1), q.size(1) / k.size(1)}; }

/// The kernel reads any strides but needs the elements of a head together.
at::Tensor dense_heads(const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

/// Queries [begin, begin + count) of a row, and the keys that they see.
struct Panel {
  int64_t begin, count, first_key;

  [[nodiscard]] Run queries(const Run& row) const { return {row.start + begin, 1, count}; }
  [[nodiscard]] Run keys(const Run& row) const { return {row.start + first_key, 1, begin + count - first_key}; }
};

bool slides(int64_t window, int64_t length) { return window > 0 && window < length; }

std::vector<Panel> panels_of(const Run& row, int64_t window) {
  const int64_t step = std::clamp<int64_t>(window, 32, 512);
  std::vector<Panel> panels;
  for (int64_t begin = 0; begin < row.length; begin += step)
    panels.push_back({begin, std::min(step, row.length - begin), std::max<int64_t>(0, begin - window + 1)});
  return panels;
}

/// (queries, keys): 0 where a query sees a key, else minus infinity. The last key is the last query's own.
at::Tensor mask_of(int64_t queries, int64_t keys, int64_t window, const at::TensorOptions& options) {
  const at::Tensor later = at::full({queries, keys}, -INFINITY, options).triu_(keys - queries + 1);
  return window > 0 ? later + at::full({queries, keys}, -INFINITY, options).tril_(keys - queries - window) : later;
}

void attend_in_panels(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Heads& heads, const Run& row,
                      double scale, int64_t window, const at::Tensor& out, const at::Tensor& lse) {
  for (const Panel& panel : panels_of(row, window)) {
    const Run asked = panel.queries(row), seen = panel.keys(row);
    const auto [part, statistic] =
        at::_scaled_dot_product_flash_attention_for_cpu(heads.queries(q, asked), heads.keys(k, seen), heads.keys(v, seen), 0.0,
                                                        false, mask_of(asked.length, seen.length, window, q.options()), scale);
    heads.statistic(lse, asked).copy_(statistic);
    out.narrow(0, asked.start, asked.length).copy_(heads.packed(part, asked));
  }
}

/// One row's gradients into dq, dk and dv, whose sums over the panels are formed in `compute`.
void attend_back_in_panels(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& out, const at::Tensor& lse, const Heads& heads, const Run& row, double scale,
                           int64_t window, at::ScalarType compute, const at::Tensor& dq, const at::Tensor& dk,
                           const at::Tensor& dv) {
  const auto of_row = [&](const at::Tensor& x) { return x.narrow(0, row.start, row.length).to(compute); };
  const at::Tensor grad = of_row(dout), query = of_row(q), key = of_row(k), value = of_row(v), attended = of_row(out);
  const at::Tensor dkey = at::zeros_like(key, at::MemoryFormat::Contiguous), dvalue = at::zeros_like(dkey);
  const Run local{0, 1, row.length};
  for (const Panel& panel : panels_of(row, window)) {
    const Run asked = panel.queries(local), seen = panel.keys(local);
    const auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads.queries(grad, asked), heads.queries(query, asked), heads.keys(key, seen), heads.keys(value, seen),
        heads.queries(attended, asked), heads.statistic(lse, panel.queries(row)), 0.0, false,
        mask_of(asked.length, seen.length, window, query.options()), scale);
    dq.narrow(0, row.start + asked.start, asked.length).copy_(heads.packed(gq, asked));
    dkey.narrow(0, seen.start, seen.length).add_(heads.packed_keys(gk, seen));
    dvalue.narrow(0, seen.start, seen.length).add_(heads.packed_keys(gv, seen));
  }
  dk.narrow(0, row.start, row.length).copy_(dkey);
  dv.narrow(0, row.start, row.length).copy_(dvalue);
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                                             at::IntArrayRef row_starts, double scale, bool /*deterministic: it always is*/,
                                             int64_t window) {
  check_attention("attention", q_in, k_in, v_in, row_starts);
  const at::Tensor q = dense_heads(q_in), k = dense_heads(k_in), v = dense_heads(v_in);
  const Heads heads = heads_of(q, k);
  const auto runs = runs_of(row_starts, heads.group > 1 || window > 0);
  at::Tensor lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(accumulate_type(q)));
  at::Tensor out = runs.size() == 1 && window == 0 ? at::Tensor() : at::empty(q.sizes(), q.options());
  for (const Run& run : runs) {
    if (slides(window, run.length)) {
      attend_in_panels(q, k, v, heads, run, scale, window, out, lse);
      continue;
    }
    const auto [part, statistic] = at::_scaled_dot_product_flash_attention_for_cpu(
        heads.queries(q, run), heads.keys(k, run), heads.keys(v, run), 0.0, true, std::nullopt, scale);
    heads.statistic(lse, run).copy_(statistic);
    const at::Tensor packed = heads.packed(part, run);
    if (out.defined()) {
      out.narrow(0, run.start, run.tokens()).copy_(packed);
    } else {
      out = packed.contiguous();
    }
  }
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& dout_in, const at::Tensor& q_in,
                                                                  const at::Tensor& k_in, const at::Tensor& v_in,
                                                                  const at::Tensor& out_in, const at::Tensor& lse,
                                                                  at::IntArrayRef row_starts, double scale, bool /*deterministic*/,
                                                                  int64_t window) {
  check_attention_backward("attention_backward", dout_in, q_in, k_in, v_in, out_in, lse, row_starts);
  at::Tensor dq = at::empty(q_in.sizes(), q_in.options()), dk = at::empty(k_in.sizes(), k_in.options()),
             dv = at::empty(v_in.sizes(), v_in.options());
  const at::Tensor dout = dense_heads(dout_in), out = dense_heads(out_in);
  const at::Tensor q = dense_heads(q_in), k = dense_heads(k_in), v = dense_heads(v_in);
  const Heads heads = heads_of(q, k);
  // In 16 bits the kernel's backward is slower than its float32 one, tenfold for float16; a run at a time is converted instead.
  const at::ScalarType compute = accumulate_type(q);
  for (const Run& run : runs_of(row_starts, heads.group > 1 || window > 0)) {
    if (slides(window, run.length)) {
      attend_back_in_panels(dout, q, k, v, out, lse, heads, run, scale, window, compute, dq, dk, dv);
      continue;
    }
    const auto converted = [&](const at::Tensor& x) {
      return x.scalar_type() == compute ? x : x.narrow(0, run.start, run.tokens()).to(compute);
    };
    const bool copied = q.scalar_type() != compute;
    const Run local = copied ? Run{0, run.rows, run.length} : run;
    const auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads.queries(converted(dout), local), heads.queries(converted(q), local), heads.keys(converted(k), local),
        heads.keys(converted(v), local), heads.queries(converted(out), local), heads.statistic(lse, run), 0.0, true, std::nullopt,
        scale);
    dq.narrow(0, run.start, run.tokens()).copy_(heads.packed(gq, run));
    dk.narrow(0, run.start, run.tokens()).copy_(heads.packed_keys(gk, run));
    dv.narrow(0, run.start, run.tokens()).copy_(heads.packed_keys(gv, run));
  }
  return {dq, dk, dv};
}

bool has_one_query_each(at::IntArrayRef row_starts) {
  for (size_t r = 0; r + 1 < row_starts.size(); ++r) {
    if (row_starts[r + 1] - row_starts[r] != 1) return false;
  }
  return true;
}

at::Tensor attention_with_cache(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, at::IntArrayRef row_starts,
                                at::IntArrayRef cache_starts, at::IntArrayRef cache_lengths, double scale, int64_t window,
                                at::IntArrayRef shared_starts, at::IntArrayRef shared_lengths) {
  const CachedRows rows{cache_starts, cache_lengths, shared_starts, shared_lengths};
  check_attention_with_cache("attention_with_cache", q_in, k_in, v_in, row_starts, rows);
  const at::Tensor q = dense_heads(q_in), k = dense_heads(k_in), v = dense_heads(v_in);
  if (std::ssize(cache_starts) == q.size(0) && has_one_query_each(row_starts))
    return cpu::attend_one_query_each(q, k, v, rows, scale, window);
  const Heads heads = heads_of(q, k);
  at::Tensor out = at::empty(q.sizes(), q.options());
  constexpr int64_t kQueries = 64;  // the mask of a block of queries stays small beside the keys
  for (size_t r = 0; r < cache_starts.size(); ++r) {
    const int64_t queries = row_starts[r + 1] - row_starts[r];
    const int64_t earlier = cache_lengths[r] - queries;                                  // keys that every query of the row sees
    const int64_t lowest = window > 0 ? std::max<int64_t>(0, earlier - window + 1) : 0;  // that any query sees
    const at::Tensor keys = rows.slots(k, r, lowest, cache_lengths[r]), values = rows.slots(v, r, lowest, cache_lengths[r]);
    const bool masked = earlier > 0 || slides(window, cache_lengths[r]);
    const int64_t step = masked ? kQueries : queries;
    for (int64_t begin = 0; begin < queries; begin += step) {
      const int64_t count = std::min(step, queries - begin);
      const int64_t first = window > 0 ? std::max<int64_t>(0, earlier + begin - window + 1) : 0;
      const Run asked{row_starts[r] + begin, 1, count}, seen{first - lowest, 1, earlier + begin + count - first};
      std::optional<at::Tensor> mask;
      if (count > 1 && masked) mask = mask_of(count, seen.length, window, q.options());
      const at::Tensor part = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
          heads.queries(q, asked), heads.keys(keys, seen), heads.keys(values, seen), 0.0, !masked, mask, scale));
      out.narrow(0, asked.start, count).copy_(heads.packed(part, asked));
    }
  }
  return out;
}

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cache_starts,
                            const at::Tensor& cache_lengths, int64_t longest, double scale, int64_t window,
                            const std::optional<at::Tensor>& shared_starts, const std::optional<at::Tensor>& shared_lengths) {
  check_decode_attention("decode_attention", q, k, v, cache_starts, cache_lengths, longest, shared_starts, shared_lengths);
  const auto list = [&](const at::Tensor& x) {
    return at::IntArrayRef(x.const_data_ptr<int64_t>(), static_cast<size_t>(x.numel()));
  };
  CachedRows rows{list(cache_starts), list(cache_lengths), {}, {}};
  if (shared_starts) rows.shared_starts = list(*shared_starts), rows.shared_lengths = list(*shared_lengths);
  return cpu::attend_one_query_each(dense_heads(q), dense_heads(k), dense_heads(v), rows, scale, window);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
  m.impl("attention_with_cache", attention_with_cache);
  m.impl("decode_attention", decode_attention);
}

}  // namespace qlorapp::ops
