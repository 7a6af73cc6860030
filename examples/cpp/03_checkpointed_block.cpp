// SPDX-License-Identifier: Apache-2.0
/// Any block with forward() and parameters() can keep its input only and run again in backward: same gradients, less memory.
#include <ATen/ATen.h>

#include <cstdio>
#include <vector>

#include "qlorapp/nn/checkpointed_block.hpp"

struct Mlp {
  at::Tensor up = (at::randn({256, 64}) / 8).requires_grad_(), down = (at::randn({64, 256}) / 16).requires_grad_();
  int* runs;

  at::Tensor forward(const at::Tensor& x) const {
    ++*runs;
    return x + at::dropout(at::gelu(x.matmul(up.t())), 0.1, /*train=*/true).matmul(down.t());
  }
  std::vector<at::Tensor> parameters() const { return {up, down}; }
};

/// Gradients of one pass through the block, with the same dropout each time.
template <class Block>
std::vector<at::Tensor> gradients(Block& block, const at::Tensor& x) {
  at::manual_seed(7);
  block.forward(x).square().mean().backward();
  std::vector<at::Tensor> result;
  for (at::Tensor& parameter : block.parameters()) {
    result.push_back(parameter.grad().clone());
    parameter.mutable_grad().reset();
  }
  return result;
}

int main() {
  at::manual_seed(0);
  int runs = 0;
  Mlp plain{.runs = &runs};
  qlorapp::CheckpointedBlock<Mlp> checkpointed(plain);  // shares the parameters
  const at::Tensor x = at::randn({32, 64});             // needs no gradient, as a frozen embedding's output

  const std::vector<at::Tensor> expected = gradients(plain, x);
  const int plain_runs = runs;
  const std::vector<at::Tensor> got = gradients(checkpointed, x);
  const bool equal = expected[0].equal(got[0]) && expected[1].equal(got[1]);
  std::printf("gradients %s; forward ran %d time, and %d times with recomputation\n", equal ? "bit-equal" : "DIFFER", plain_runs,
              runs - plain_runs);
  return equal && plain_runs == 1 && runs == 3 ? 0 : 1;
}
