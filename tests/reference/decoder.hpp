// SPDX-License-Identifier: Apache-2.0
/// A decoder with LoRA over dense weights, and its derivatives, written as plainly as the papers in double precision: the oracle for the
/// hand-written one. The defaults are Llama's; what other families do is an option. Matrix products are Eigen's; the rest is composed of the
/// oracles of tests/ops. Rounding rules (where a norm's result is cast) have no counterpart here.
///
/// Source: transformers 5.23, modeling_llama.py, modeling_qwen3.py, modeling_gemma3.py, modeling_olmo2.py, modeling_granite.py.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "reference/layers.hpp"

namespace qlorapp::reference {

struct Lora {
  Matrix a, b;  ///< (r, in), (out, r); empty where there is none.
  double scaling = 1;
};

struct Block {
  int64_t heads, kv_heads, head_dim;
  double eps;
  Values input_norm, post_attention_norm;  ///< Before attention and before the MLP; empty: none.
  std::array<Matrix, 7> weights;           ///< q, k, v, o, gate, up, down; dense (out, in).
  std::array<Lora, 7> lora;
  std::array<Values, 7> bias = {};              ///< (out); empty: none.
  Values q_norm = {}, k_norm = {};              ///< Before RoPE: (d), of each head, or (H·d), of all as one; empty: none.
  Values after_attention = {}, after_mlp = {};  ///< Norms of what the parts add to the residual; empty: none.
  bool one_plus = false;                        ///< Norms multiply by 1 + weight.
  double attention_scale = 0;                   ///< 0: d^(-1/2).
  double residual_factor = 1;                   ///< Of what the parts add.
  int64_t window = 0;                           ///< As attention().
  Rotary rotary = {};
  bool turns_before_norm = false;  ///< Of q and k.
  Activation activation = Activation::kSilu;
};

/// Tokens [starts[r], starts[r + 1]) attend to each other alone and count their positions from 0; cos, sin (longest row, d / 2).
struct Rows {
  Values cos, sin;
  std::vector<int64_t> starts;

  std::vector<int64_t> positions() const {
    std::vector<int64_t> all;
    for (std::size_t r = 0; r + 1 < starts.size(); ++r) {
      for (int64_t i = starts[r]; i < starts[r + 1]; ++i) all.push_back(i - starts[r]);
    }
    return all;
  }
};

/// The other direction of rows().
inline Values values(const Matrix& x) { return {x.data(), x.data() + x.size()}; }

inline Matrix linear(const Block& block, std::size_t i, const Matrix& x) {
  Matrix y = x * block.weights[i].transpose();
  const Lora& lora = block.lora[i];
  if (lora.a.size() > 0) y += lora.scaling * (x * lora.a.transpose()) * lora.b.transpose();
  if (!block.bias[i].empty()) y.rowwise() += rows(block.bias[i], y.cols()).row(0);
  return y;
}

/// x (M, n) normed in rows of weight's length, heads among them; x itself without a weight.
struct Norm {
  Values weight;
  double eps;

  Norm(Values plain, double epsilon, bool one_plus) : weight(std::move(plain)), eps(epsilon) {
    for (double& w : weight) w += one_plus ? 1 : 0;
  }
  [[nodiscard]] Matrix forward(const Matrix& x) const {
    if (weight.empty()) return x;
    const Values y = rms_norm(values(x), weight, Values(static_cast<std::size_t>(x.size())), eps).y;
    return rows(y, x.cols());
  }
  [[nodiscard]] Matrix backward(const Matrix& x, const Matrix& dy) const {
    if (weight.empty()) return dy;
    const Values dx = rms_norm(values(x), weight, values(dy), eps).dx;
    return rows(dx, x.cols());
  }
};

inline Norm norm_of(const Block& block, const Values& weight) { return {weight, block.eps, block.one_plus}; }

inline double scale_of(const Block& block) {
  return block.attention_scale > 0 ? block.attention_scale : 1 / std::sqrt(static_cast<double>(block.head_dim));
}

/// What lies between a block's input and its output.
struct Activations {
  Matrix normed;        ///< The input of q, k and v.
  Matrix raw_q, raw_k;  ///< Before their norms.
  Values q, k, v;       ///< As attention sees them: q and k normed and turned.
  Matrix attended, o, x2, normed2, gate_up, h, down, y;
};

/// x (M, D).
inline Activations activations(const Block& block, const Matrix& x, const Rows& layout) {
  const int64_t d = block.head_dim, intermediate = block.weights[4].rows();
  const std::vector<int64_t> positions = layout.positions();
  Activations a;
  const auto turned = [&](const Matrix& raw, const Values& norm, int64_t heads) {
    const auto turn = [&](const Matrix& q) {
      return rope(values(q), heads, d, layout.cos, layout.sin, positions, 1, block.rotary);
    };
    if (block.turns_before_norm) {
      const Values early = turn(raw);
      return values(norm_of(block, norm).forward(rows(early, raw.cols())));
    }
    return turn(norm_of(block, norm).forward(raw));
  };
  a.normed = norm_of(block, block.input_norm).forward(x);
  a.raw_q = linear(block, 0, a.normed);
  a.raw_k = linear(block, 1, a.normed);
  a.q = turned(a.raw_q, block.q_norm, block.heads);
  a.k = turned(a.raw_k, block.k_norm, block.kv_heads);
  a.v = values(linear(block, 2, a.normed));
  const Values attended =
      attention(a.q, a.k, a.v, Values(a.q.size()), block.heads, block.kv_heads, d, layout.starts, scale_of(block), block.window)
          .out;
  a.attended = rows(attended, block.heads * d);
  a.o = linear(block, 3, a.attended);
  a.x2 = x + block.residual_factor * norm_of(block, block.after_attention).forward(a.o);
  a.normed2 = norm_of(block, block.post_attention_norm).forward(a.x2);
  a.gate_up.resize(x.rows(), 2 * intermediate);
  a.gate_up << linear(block, 4, a.normed2), linear(block, 5, a.normed2);
  const Values h =
      gated_activation(values(a.gate_up), Values(static_cast<std::size_t>(x.rows() * intermediate)), intermediate, block.activation)
          .h;
  a.h = rows(h, intermediate);
  a.down = linear(block, 6, a.h);
  a.y = a.x2 + block.residual_factor * norm_of(block, block.after_mlp).forward(a.down);
  return a;
}

inline Matrix forward(const Block& block, const Matrix& x, const Rows& layout) { return activations(block, x, layout).y; }

struct LoraGradients {
  Matrix a, b;  ///< Empty where there is no adapter.
};
struct BlockGradients {
  Matrix x;
  std::array<LoraGradients, 7> lora;
};

/// The gradient of linear's input; that of its adapter goes to `gradients`.
inline Matrix linear_backward(const Block& block, std::size_t i, const Matrix& x, const Matrix& dy, LoraGradients& gradients) {
  Matrix dx = dy * block.weights[i];
  const Lora& lora = block.lora[i];
  if (lora.a.size() > 0) {
    const Matrix d_low = lora.scaling * dy * lora.b;
    gradients.a = d_low.transpose() * x;
    gradients.b = lora.scaling * dy.transpose() * (x * lora.a.transpose());
    dx += d_low * lora.a;
  }
  return dx;
}

/// The gradients of Σ y · dy.
inline BlockGradients backward(const Block& block, const Matrix& x, const Rows& layout, const Matrix& dy) {
  const int64_t d = block.head_dim, intermediate = block.weights[4].rows();
  const std::vector<int64_t> positions = layout.positions();
  const Activations a = activations(block, x, layout);
  BlockGradients gradients;
  const auto back = [&](std::size_t i, const Matrix& input, const Matrix& gradient) {
    return linear_backward(block, i, input, gradient, gradients.lora[i]);
  };
  const auto norm_back = [&](const Matrix& input, const Values& weight, const Matrix& gradient) {
    return norm_of(block, weight).backward(input, gradient);
  };
  const auto turn_back = [&](const Values& gradient, const Matrix& raw, const Values& norm, int64_t heads) -> Matrix {
    const auto turn = [&](const Values& q, double direction) {
      return rope(q, heads, d, layout.cos, layout.sin, positions, direction, block.rotary);
    };
    if (block.turns_before_norm) {
      const Values turned = turn(values(raw), 1),
                   dnormed = values(norm_back(rows(turned, heads * d), norm, rows(gradient, heads * d)));
      const Values back_again = turn(dnormed, -1);
      return rows(back_again, heads * d);
    }
    const Values turned = turn(gradient, -1);
    return norm_back(raw, norm, rows(turned, heads * d));
  };
  const Matrix d_down = norm_back(a.down, block.after_mlp, block.residual_factor * dy);
  const Values d_gate_up =
      gated_activation(values(a.gate_up), values(back(6, a.h, d_down)), intermediate, block.activation).d_gate_up;
  const Matrix d_gate = rows(d_gate_up, 2 * intermediate).leftCols(intermediate);
  const Matrix d_up = rows(d_gate_up, 2 * intermediate).rightCols(intermediate);
  const Matrix dx2 = dy + norm_back(a.x2, block.post_attention_norm, back(4, a.normed2, d_gate) + back(5, a.normed2, d_up));
  const Matrix d_o = norm_back(a.o, block.after_attention, block.residual_factor * dx2);
  const Attention inner = attention(a.q, a.k, a.v, values(back(3, a.attended, d_o)), block.heads, block.kv_heads, d, layout.starts,
                                    scale_of(block), block.window);
  const Matrix d_normed = back(0, a.normed, turn_back(inner.dq, a.raw_q, block.q_norm, block.heads)) +
                          back(1, a.normed, turn_back(inner.dk, a.raw_k, block.k_norm, block.kv_heads)) +
                          back(2, a.normed, rows(inner.dv, block.kv_heads * d));
  gradients.x = dx2 + norm_back(x, block.input_norm, d_normed);
  return gradients;
}

struct Model {
  Matrix embed_tokens;
  std::vector<Block> blocks;
  Values norm;
  double eps;
  Matrix lm_head;
  bool one_plus = false;        ///< Of the last norm.
  double embedding_factor = 1;  ///< Of what the first block gets.
  Logits logits = {};
};

struct LossAndGradients {
  double loss = 0;
  std::vector<BlockGradients> blocks;
};

/// Cross-entropy summed over targets >= 0. @param layouts  of each block, whose rotary tables may differ; or one for all.
inline LossAndGradients loss_and_gradients(const Model& model, const std::vector<int64_t>& tokens,
                                           const std::vector<int64_t>& targets, const std::vector<Rows>& layouts) {
  const int64_t width = model.embed_tokens.cols();
  std::vector<Matrix> inputs(1, Matrix(static_cast<int64_t>(tokens.size()), width));  // of each block, and of the last norm
  for (std::size_t m = 0; m < tokens.size(); ++m)
    inputs[0].row(static_cast<int64_t>(m)) = model.embedding_factor * model.embed_tokens.row(tokens[m]);
  const auto of_block = [&](std::size_t i) -> const Rows& { return layouts.size() == 1 ? layouts.front() : layouts[i]; };
  for (std::size_t i = 0; i < model.blocks.size(); ++i) inputs.push_back(forward(model.blocks[i], inputs.back(), of_block(i)));
  const Norm last(model.norm, model.eps, model.one_plus);
  const CrossEntropy head =
      linear_cross_entropy(values(last.forward(inputs.back())), values(model.lm_head), targets, width, model.logits);
  Matrix dx = last.backward(inputs.back(), rows(head.d_hidden, width));
  LossAndGradients result{head.loss, std::vector<BlockGradients>(model.blocks.size())};
  for (std::size_t i = model.blocks.size(); i-- > 0;) {
    result.blocks[i] = backward(model.blocks[i], inputs[i], of_block(i), dx);
    dx = result.blocks[i].x;
  }
  return result;
}

}  // namespace qlorapp::reference
