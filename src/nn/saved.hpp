// SPDX-License-Identifier: Apache-2.0
/// What one block keeps between its forward and its backward pass.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"

namespace qlorapp {

/// What a part of a block keeps. Undefined tensors are formed again by the block's backward pass.
struct PartSaved {
  std::vector<at::Tensor> tensors;     ///< The part names them by an enum of its own.
  std::vector<at::Tensor> u;           ///< (M, r) of each linear layer of the part: input times Aᵀ, where there is an adapter.
  at::Tensor output;                   ///< (M, D), if a norm acts on it.
  at::Tensor rstd_before, rstd_after;  ///< (M) float32 of the norms around it.
};

/// What one block keeps for one micro-batch.
struct Saved {
  at::Tensor x;            ///< (M, D) input of the block.
  bool x_on_host = false;  ///< x is a copy in pinned host memory, restored by StepContext::offload.
  at::Tensor x2;           ///< (M, D) residual after attention.
  PartSaved attention, mlp;

  /// All of its tensors: the only list of them. @param visit  takes an at::Tensor&, which may be undefined.
  template <class Visit>
  void for_each(Visit&& visit) {
    visit(x);
    visit(x2);
    for (PartSaved* const part : {&attention, &mlp}) {
      for (at::Tensor& tensor : part->tensors) visit(tensor);
      for (at::Tensor& u : part->u) visit(u);
      for (at::Tensor* const tensor : {&part->output, &part->rstd_before, &part->rstd_after}) visit(*tensor);
    }
  }

  /// On the device that computes. Tensors that share their memory count it once.
  [[nodiscard]] Bytes nbytes() const;
  /// In pinned host memory beside a GPU.
  [[nodiscard]] Bytes host_nbytes() const;
};

}  // namespace qlorapp
