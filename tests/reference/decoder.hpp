// SPDX-License-Identifier: Apache-2.0
/// A Llama block written as plainly as the paper, over dense weights and differentiable ATen operators: the oracle for the
/// hand-written one. Attention is softmax of an explicit masked score matrix.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace reference {

struct Lora {
  at::Tensor a, b;  ///< (r, in), (out, r); undefined where there is none.
  double scaling = 1;
};

struct Block {
  int64_t heads, kv_heads, head_dim;
  double eps;
  at::Tensor input_norm, post_attention_norm;
  std::array<at::Tensor, 7> weights;  ///< q, k, v, o, gate, up, down; dense (out, in).
  std::array<Lora, 7> lora;
};

inline at::Tensor linear(const Block& block, size_t i, const at::Tensor& x) {
  at::Tensor y = at::matmul(x, block.weights[i].t());
  const Lora& lora = block.lora[i];
  return lora.a.defined() ? y + lora.scaling * at::matmul(at::matmul(x, lora.a.t()), lora.b.t()) : y;
}

inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * at::rsqrt(x.pow(2).mean(-1, true) + eps) * weight;
}

/// x (T, heads, d); the angle of pair (j, j + d/2) at position t is t · theta^(-2j/d).
inline at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor c = at::cat({cos, cos}, -1).unsqueeze(1), s = at::cat({sin, sin}, -1).unsqueeze(1);
  const auto halves = x.chunk(2, -1);
  return x * c + at::cat({-halves[1], halves[0]}, -1) * s;
}

/// q (T, H, d), k and v (T, H_kv, d) of one row.
inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t group = q.size(1) / k.size(1), length = q.size(0);
  const at::Tensor qt = q.transpose(0, 1), kt = k.repeat_interleave(group, 1).transpose(0, 1);
  const at::Tensor vt = v.repeat_interleave(group, 1).transpose(0, 1);
  at::Tensor scores = at::matmul(qt, kt.transpose(1, 2)) / std::sqrt(static_cast<double>(q.size(2)));
  const at::Tensor future = at::ones({length, length}, at::kBool).triu(1);
  scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  return at::matmul(at::softmax(scores, -1), vt).transpose(0, 1).reshape({length, -1});
}

/// x (M, D); rows [row_starts[r], row_starts[r + 1]) are independent; cos, sin (longest row, d / 2).
inline at::Tensor forward(const Block& block, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                          const std::vector<int64_t>& row_starts) {
  const at::Tensor n1 = rms_norm(x, block.input_norm, block.eps);
  const at::Tensor q = linear(block, 0, n1).unflatten(1, {block.heads, block.head_dim});
  const at::Tensor k = linear(block, 1, n1).unflatten(1, {block.kv_heads, block.head_dim});
  const at::Tensor v = linear(block, 2, n1).unflatten(1, {block.kv_heads, block.head_dim});
  std::vector<at::Tensor> rows;
  for (size_t r = 0; r + 1 < row_starts.size(); ++r) {
    const int64_t begin = row_starts[r], length = row_starts[r + 1] - begin;
    const at::Tensor c = cos.narrow(0, 0, length), s = sin.narrow(0, 0, length);
    rows.push_back(
        attention(rope(q.narrow(0, begin, length), c, s), rope(k.narrow(0, begin, length), c, s), v.narrow(0, begin, length)));
  }
  const at::Tensor x2 = x + linear(block, 3, at::cat(rows));
  const at::Tensor n2 = rms_norm(x2, block.post_attention_norm, block.eps);
  return x2 + linear(block, 6, at::silu(linear(block, 4, n2)) * linear(block, 5, n2));
}

}  // namespace reference
