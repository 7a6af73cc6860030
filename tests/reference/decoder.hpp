// SPDX-License-Identifier: Apache-2.0
/// A Llama decoder with LoRA over dense weights, and its derivatives, written as plainly as the paper in double precision: the
/// oracle for the hand-written one. Matrix products are Eigen's; the rest is composed of the oracles of tests/ops.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
  Values input_norm, post_attention_norm;
  std::array<Matrix, 7> weights;  ///< q, k, v, o, gate, up, down; dense (out, in).
  std::array<Lora, 7> lora;
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
  return y;
}

inline Matrix rms_norm(const Matrix& x, const Values& weight, double eps) {
  const Values y = rms_norm(values(x), weight, Values(static_cast<std::size_t>(x.size())), eps).y;
  return rows(y, x.cols());
}

/// What lies between a block's input and its output.
struct Activations {
  Matrix normed;   ///< The input of q, k and v.
  Values q, k, v;  ///< As attention sees them: q and k turned.
  Matrix attended, x2, normed2, gate_up, h, y;
};

/// x (M, D).
inline Activations activations(const Block& block, const Matrix& x, const Rows& layout) {
  const int64_t d = block.head_dim, intermediate = block.weights[4].rows();
  const std::vector<int64_t> positions = layout.positions();
  Activations a;
  a.normed = rms_norm(x, block.input_norm, block.eps);
  a.q = rope(values(linear(block, 0, a.normed)), block.heads, d, layout.cos, layout.sin, positions, 1);
  a.k = rope(values(linear(block, 1, a.normed)), block.kv_heads, d, layout.cos, layout.sin, positions, 1);
  a.v = values(linear(block, 2, a.normed));
  const Values attended = attention(a.q, a.k, a.v, Values(a.q.size()), block.heads, block.kv_heads, d, layout.starts,
                                    1 / std::sqrt(static_cast<double>(d)))
                              .out;
  a.attended = rows(attended, block.heads * d);
  a.x2 = x + linear(block, 3, a.attended);
  a.normed2 = rms_norm(a.x2, block.post_attention_norm, block.eps);
  a.gate_up.resize(x.rows(), 2 * intermediate);
  a.gate_up << linear(block, 4, a.normed2), linear(block, 5, a.normed2);
  const Values h = swiglu(values(a.gate_up), Values(static_cast<std::size_t>(x.rows() * intermediate)), intermediate).h;
  a.h = rows(h, intermediate);
  a.y = a.x2 + linear(block, 6, a.h);
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
  const auto norm_back = [&](const Matrix& input, const Values& weight, const Matrix& gradient) -> Matrix {
    const Values dx = rms_norm(values(input), weight, values(gradient), block.eps).dx;
    return rows(dx, input.cols());
  };
  const auto turn_back = [&](const Values& gradient, int64_t heads) -> Matrix {
    const Values turned = rope(gradient, heads, d, layout.cos, layout.sin, positions, -1);
    return rows(turned, heads * d);
  };
  const Values d_gate_up = swiglu(values(a.gate_up), values(back(6, a.h, dy)), intermediate).d_gate_up;
  const Matrix d_gate = rows(d_gate_up, 2 * intermediate).leftCols(intermediate);
  const Matrix d_up = rows(d_gate_up, 2 * intermediate).rightCols(intermediate);
  const Matrix dx2 = dy + norm_back(a.x2, block.post_attention_norm, back(4, a.normed2, d_gate) + back(5, a.normed2, d_up));
  const Attention inner = attention(a.q, a.k, a.v, values(back(3, a.attended, dx2)), block.heads, block.kv_heads, d, layout.starts,
                                    1 / std::sqrt(static_cast<double>(d)));
  const Matrix d_normed = back(0, a.normed, turn_back(inner.dq, block.heads)) +
                          back(1, a.normed, turn_back(inner.dk, block.kv_heads)) +
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
};

struct LossAndGradients {
  double loss = 0;
  std::vector<BlockGradients> blocks;
};

/// Cross-entropy summed over targets >= 0.
inline LossAndGradients loss_and_gradients(const Model& model, const std::vector<int64_t>& tokens,
                                           const std::vector<int64_t>& targets, const Rows& layout) {
  const int64_t width = model.embed_tokens.cols();
  std::vector<Matrix> inputs(1, Matrix(static_cast<int64_t>(tokens.size()), width));  // of each block, and of the last norm
  for (std::size_t m = 0; m < tokens.size(); ++m) inputs[0].row(static_cast<int64_t>(m)) = model.embed_tokens.row(tokens[m]);
  for (const Block& block : model.blocks) inputs.push_back(forward(block, inputs.back(), layout));
  const Matrix hidden = rms_norm(inputs.back(), model.norm, model.eps);
  const CrossEntropy head = linear_cross_entropy(values(hidden), values(model.lm_head), targets, width);
  const Values d_last = rms_norm(values(inputs.back()), model.norm, head.d_hidden, model.eps).dx;
  Matrix dx = rows(d_last, width);
  LossAndGradients result{head.loss, std::vector<BlockGradients>(model.blocks.size())};
  for (std::size_t i = model.blocks.size(); i-- > 0;) {
    result.blocks[i] = backward(model.blocks[i], inputs[i], layout, dx);
    dx = result.blocks[i].x;
  }
  return result;
}

}  // namespace qlorapp::reference
