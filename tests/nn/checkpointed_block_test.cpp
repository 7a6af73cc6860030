// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/checkpointed_block.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/nn/keep.hpp"

using namespace qlorapp;

namespace {

/// Two linear layers with dropout between them; counts its calls.
struct Mlp {
  at::Tensor first = (at::randn({32, 16}) * 0.2).requires_grad_();
  at::Tensor second = (at::randn({16, 32}) * 0.2).requires_grad_();
  std::shared_ptr<int> calls = std::make_shared<int>(0);

  at::Tensor forward(const at::Tensor& x) {
    ++*calls;
    return at::linear(at::dropout(at::gelu(at::linear(x, first)), 0.5, true), second) + x;
  }
  std::vector<at::Tensor> parameters() const { return {first, second}; }
};

/// A checkpointed block is a block itself.
struct Outer {
  CheckpointedBlock<Mlp> inner;
  at::Tensor gain = at::ones({16}).requires_grad_();

  at::Tensor forward(const at::Tensor& x) { return at::dropout(inner.forward(x * gain), 0.3, true); }
  std::vector<at::Tensor> parameters() {
    std::vector<at::Tensor> all = inner.parameters();
    all.push_back(gain);
    return all;
  }
};

template <class Block>
std::vector<at::Tensor> gradients(Block& block, at::Tensor x, std::vector<at::Tensor> wanted) {
  at::manual_seed(5);
  const at::Tensor y = block.forward(x);
  return torch::autograd::grad({y.pow(2).sum()}, wanted);
}

}  // namespace

TEST_CASE("gradients of a checkpointed block are bit-equal to the block's, dropout on, run twice", "[nn][cpu]") {
  const bool input_needs_gradient = GENERATE(true, false);
  at::manual_seed(1);
  Mlp block;
  const at::Tensor x = at::randn({8, 16}).set_requires_grad(input_needs_gradient);
  std::vector<at::Tensor> wanted = block.parameters();
  if (input_needs_gradient) wanted.push_back(x);
  const auto expected = gradients(block, x, wanted);
  REQUIRE(*block.calls == 1);
  CheckpointedBlock<Mlp> checked(block);
  const auto found = gradients(checked, x, wanted);
  REQUIRE(*block.calls == 3);  // one forward, one recompute
  for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(at::equal(found[i], expected[i]));
}

TEST_CASE("checkpointed blocks nest, bit-equal", "[nn][cpu]") {
  at::manual_seed(2);
  Mlp mlp;
  Outer outer{CheckpointedBlock<Mlp>(mlp)};
  const at::Tensor x = at::randn({8, 16}).requires_grad_();
  std::vector<at::Tensor> wanted = outer.parameters();
  wanted.push_back(x);
  const auto once = gradients(outer, x, wanted);
  CheckpointedBlock<Outer> twice(outer);
  const auto nested = gradients(twice, x, wanted);
  for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(at::equal(nested[i], once[i]));
}

TEST_CASE("the recompute leaves the generator where the forward left it", "[nn][cpu]") {
  at::manual_seed(3);
  CheckpointedBlock<Mlp> checked{Mlp()};
  at::manual_seed(4);
  const at::Tensor y = checked.forward(at::randn({8, 16}));
  const at::Tensor expected = at::rand({4});
  at::manual_seed(4);
  const at::Tensor again = checked.forward(at::randn({8, 16}));
  torch::autograd::backward({again.sum()}, {});
  REQUIRE(at::equal(at::rand({4}), expected));
}

TEST_CASE("the recompute runs in the autocast mode of the forward", "[nn][cpu]") {
  struct Seen {
    at::Tensor weight = at::randn({4, 4}).requires_grad_();
    std::shared_ptr<std::vector<at::ScalarType>> dtypes = std::make_shared<std::vector<at::ScalarType>>();
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = at::linear(x, weight);
      dtypes->push_back(y.scalar_type());
      return y;
    }
    std::vector<at::Tensor> parameters() const { return {weight}; }
  } block;
  CheckpointedBlock<Seen> checked(block);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const at::Tensor y = checked.forward(at::randn({2, 4}));
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  torch::autograd::backward({y.sum()}, {});
  REQUIRE(*block.dtypes == std::vector{at::kBFloat16, at::kBFloat16});
  REQUIRE_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_CASE("without anything to train a checkpointed block just runs", "[nn][cpu]") {
  Mlp mlp;
  CheckpointedBlock<Mlp> checked(mlp);
  const at::NoGradGuard no_grad;
  REQUIRE_FALSE(checked.forward(at::randn({2, 16})).requires_grad());
  REQUIRE(*mlp.calls == 1);
}

TEST_CASE("a gradient of a gradient through a checkpoint is refused, not wrong", "[nn][cpu]") {
  CheckpointedBlock<Mlp> checked{Mlp()};
  const at::Tensor y = checked.forward(at::randn({2, 16}).requires_grad_());
  REQUIRE_THROWS(torch::autograd::grad({y.sum()}, checked.parameters(), {}, true, /*create_graph=*/true));
}

TEST_CASE("schedules cover all blocks: each, every k-th, about the square root", "[nn][cpu]") {
  REQUIRE(keep_in_each_block(3, Keep::kInputOnly).size() == 3);
  const auto every = checkpoint_every(7, 3);
  REQUIRE(every.size() == 3);
  REQUIRE(every.back().begin == 6);
  REQUIRE(every.back().end == 7);
  REQUIRE(checkpoint_sqrt(16).size() == 4);
  REQUIRE(checkpoint_sqrt(1).size() == 1);
  REQUIRE_THROWS_AS(checkpoint_every(4, 0), ValueError);
  for (const Keep keep : {Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly, Keep::kInputOnHost}) {
    REQUIRE(parse_keep(to_string(keep)) == keep);
  }
  REQUIRE(checkpoint_every(7, 3, Keep::kInputOnHost).back().keep == Keep::kInputOnHost);
  REQUIRE_THROWS_AS(checkpoint_every(7, 3, Keep::kAttentionOnly), ValueError);
  REQUIRE_THROWS_AS(parse_keep("inputs_only"), ValueError);
}
