// SPDX-License-Identifier: Apache-2.0
/// What one block keeps between its forward and its backward pass.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"

namespace qlorapp {

/// What one block keeps for one micro-batch. Undefined tensors are formed again by the block's backward pass.
struct Saved {
  at::Tensor x;               ///< (M, D) input of the block.
  bool x_on_host = false;     ///< x is a copy in pinned host memory, restored by StepContext::offload.
  at::Tensor qkv;             ///< (M, (H + 2·H_kv)·d), q and k already turned by RoPE.
  at::Tensor attention;       ///< (M, H·d) before o_proj.
  at::Tensor lse;             ///< (H, M) float32, log-sum-exp of the attention scores.
  at::Tensor x2;              ///< (M, D) residual after attention.
  at::Tensor rstd1, rstd2;    ///< (M) float32 of the two norms.
  at::Tensor gate_up;         ///< (M, 2·I).
  std::vector<at::Tensor> u;  ///< (M, r) of each linear layer: input times Aᵀ, where there is an adapter.

  /// On the device that computes.
  [[nodiscard]] Bytes nbytes() const;
  /// In pinned host memory beside a GPU.
  [[nodiscard]] Bytes host_nbytes() const;
};

}  // namespace qlorapp
