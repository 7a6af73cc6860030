// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/checkpointed_block.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/lora_linear.hpp"
#include "qlorapp/quant/quantizer.hpp"

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
  REQUIRE_THROWS_AS(torch::autograd::grad({y.sum()}, checked.parameters(), {}, true, /*create_graph=*/true), qlorapp::Error);
}

TEST_CASE("gradients reach tensors that no list names: a captured parameter, a captured result, an autograd hook once",
          "[nn][cpu]") {
  at::manual_seed(6);
  const at::Tensor listed = at::randn({16, 16}).requires_grad_(), other = at::randn({16, 16}).requires_grad_();
  const at::Tensor x = at::randn({4, 16}).requires_grad_();
  int hooks = 0;
  other.register_hook([&hooks](const at::Tensor& gradient) {
    ++hooks;
    return gradient * 2;
  });
  const auto loss = [&](bool checked) {
    const at::Tensor outside = other.tanh();  // of the outer graph, used inside and outside of the block
    const auto block = [listed, other, outside](const at::Tensor& input) {
      return at::tanh(input.matmul(listed)).matmul(other) + outside.sum();
    };
    const at::Tensor y = checked ? checkpoint(block, x) : block(x);
    return (y * y).sum() + (outside * x.sum()).sum();
  };
  const auto gradients_of = [&](bool checked) {
    hooks = 0;
    for (const at::Tensor& leaf : {listed, other, x}) leaf.mutable_grad().reset();
    torch::autograd::backward({loss(checked)}, {});
    REQUIRE(hooks == 1);
    return std::vector{listed.grad().clone(), other.grad().clone(), x.grad().clone()};
  };
  const auto expected = gradients_of(false), found = gradients_of(true);
  for (size_t i = 0; i < expected.size(); ++i) REQUIRE(at::allclose(found[i], expected[i], 1e-6, 1e-5));

  // Asked for one of them, nothing is added to the others.
  for (const at::Tensor& leaf : {listed, other, x}) leaf.mutable_grad().reset();
  const auto alone = torch::autograd::grad({loss(true)}, {other});
  REQUIRE(at::allclose(alone[0], expected[1], 1e-6, 1e-5));
  REQUIRE_FALSE(listed.grad().defined());
  REQUIRE_FALSE(x.grad().defined());
}

TEST_CASE("an unlisted parameter two checkpoints deep has its gradient, bit-equal", "[nn][cpu]") {
  at::manual_seed(7);
  const at::Tensor w = at::randn({16, 16}).requires_grad_(), v = at::randn({16, 16}).requires_grad_(), x = at::randn({4, 16});
  const auto gradients_of = [&](bool checked) {
    const auto inner = [w](const at::Tensor& input) { return at::dropout(input.matmul(w).tanh(), 0.5, true); };
    const auto outer = [&, inner](const at::Tensor& input) {
      const at::Tensor scaled = input * v.sum();  // an inner block may use what the outer one computed
      const auto shifted = [inner, scaled](const at::Tensor& h) { return inner(h) + scaled; };
      return checked ? checkpoint(shifted, checkpoint(inner, input)) : shifted(inner(input));
    };
    at::manual_seed(8);
    return torch::autograd::grad({(checked ? checkpoint(outer, x) : outer(x)).square().sum()}, {w, v});
  };
  const auto expected = gradients_of(false), found = gradients_of(true);
  REQUIRE(at::equal(found[0], expected[0]));
  REQUIRE(at::equal(found[1], expected[1]));
}

TEST_CASE("writes into a buffer inside of a block keep their gradients, of inputs and captured tensors", "[nn][cpu]") {
  at::manual_seed(9);
  const at::Tensor w = at::randn({8, 8}).requires_grad_(), x = at::randn({4, 8}).requires_grad_();
  const auto block = [w](const at::Tensor& input) {
    const at::Tensor rows = at::zeros({16, 8});
    rows.narrow(0, 0, 4).copy_(input);
    rows.narrow(0, 4, 8).copy_(w);
    rows.narrow(0, 2, 4).mul_(input);
    return rows.square();
  };
  const at::Tensor dy = at::randn({16, 8});
  const auto expected = torch::autograd::grad({block(x)}, {w, x}, {dy});
  const auto found = torch::autograd::grad({checkpoint(block, x)}, {w, x}, {dy});
  REQUIRE(at::equal(found[0], expected[0]));
  REQUIRE(at::equal(found[1], expected[1]));
}

TEST_CASE("a checkpointed block may be gone before backward: a temporary, one in a vector that grows", "[nn][cpu]") {
  at::manual_seed(10);
  const at::Tensor x = at::randn({8, 16}).requires_grad_();
  Mlp mlp;
  const auto expected = gradients(mlp, x, mlp.parameters());
  const auto check = [&](const at::Tensor& y) {
    const auto found = torch::autograd::grad({y.pow(2).sum()}, mlp.parameters());
    for (size_t i = 0; i < found.size(); ++i) REQUIRE(at::equal(found[i], expected[i]));
  };
  at::manual_seed(5);
  check(CheckpointedBlock<Mlp>(mlp).forward(x));
  at::manual_seed(5);
  check(checkpoint(std::make_shared<Mlp>(mlp), x));
  at::manual_seed(5);
  at::Tensor y;
  {
    std::vector<CheckpointedBlock<Mlp>> blocks;
    blocks.emplace_back(mlp);
    y = blocks[0].forward(x);
    for (int i = 0; i < 20; ++i) blocks.emplace_back(Mlp());
  }
  check(y);
  REQUIRE_THROWS_AS(CheckpointedBlock<std::shared_ptr<Mlp>>(nullptr), ValueError);
}

TEST_CASE("the graph lets go of the block when it is freed or has run backward", "[nn][cpu]") {
  const auto block = std::make_shared<Mlp>();
  const std::weak_ptr<Mlp> seen = block;
  at::Tensor y = checkpoint(block, at::randn({2, 16}));
  REQUIRE(block.use_count() == 2);
  torch::autograd::backward({y.sum()}, {});
  REQUIRE(block.use_count() == 1);
  REQUIRE_THROWS_WITH(torch::autograd::backward({y.sum()}, {}), Catch::Matchers::ContainsSubstring("second time"));
  y = checkpoint(block, at::randn({2, 16}));
  y.reset();
  REQUIRE(block.use_count() == 1);
}

TEST_CASE("a checkpointed block accepts other arguments than tensors and returns several tensors", "[nn][cpu]") {
  at::manual_seed(11);
  struct Split {
    at::Tensor weight = at::randn({8, 8}).requires_grad_();
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, double scale, const at::Tensor& y, bool swap) const {
      const at::Tensor a = x.matmul(weight) * scale, b = y.matmul(weight).tanh();
      return swap ? std::tuple{b, a} : std::tuple{a, b};
    }
  } const block;
  const at::Tensor x = at::randn({2, 8}).requires_grad_(), y = at::randn({2, 8});
  const CheckpointedBlock<Split> checked(block);
  const auto [first, second] = checked.forward(x, 3.0, y, true);
  const auto [plain_first, plain_second] = block.forward(x, 3.0, y, true);
  REQUIRE(at::equal(first, plain_first));
  REQUIRE(at::equal(second, plain_second));
  const auto found = torch::autograd::grad({first.sum() + second.square().sum()}, {block.weight, x});
  const auto expected = torch::autograd::grad({plain_first.sum() + plain_second.square().sum()}, {block.weight, x});
  REQUIRE(at::allclose(found[0], expected[0], 1e-6, 1e-6));
  REQUIRE(at::equal(found[1], expected[1]));
  // Only one of two outputs is used.
  const auto unused = checkpoint([&](const at::Tensor& input) { return std::vector{input * 2, input * block.weight.sum()}; }, x);
  REQUIRE(at::equal(torch::autograd::grad({unused[0].sum()}, {x})[0], at::full_like(x, 2)));
}

TEST_CASE("an output may be an input, a captured parameter, or changed in place by its user", "[nn][cpu]") {
  const at::Tensor w = at::randn({3}).requires_grad_(), x = at::randn({3}).requires_grad_();
  const auto outputs = checkpoint([w](const at::Tensor& input) { return std::vector{input, w, input * w}; }, x);
  outputs[2].mul_(3);
  const auto found = torch::autograd::grad({(outputs[0] * 5 + outputs[1] * 7 + outputs[2]).sum()}, {x, w});
  REQUIRE(at::allclose(found[0], 5 + 3 * w));
  REQUIRE(at::allclose(found[1], 7 + 3 * x));
}

TEST_CASE("under autocast a weight that is used outside, too, loses no gradient", "[nn][cpu]") {
  at::manual_seed(12);
  const at::Tensor w = at::randn({8, 8}).requires_grad_(), x = at::randn({4, 8});
  const auto gradient = [&](bool checked, bool outside_first) {
    const auto block = [w](const at::Tensor& input) { return at::linear(input, w).to(at::kFloat); };
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
    at::Tensor loss = outside_first ? at::linear(x, w).to(at::kFloat).sum() : at::zeros({});
    loss = loss + (checked ? checkpoint(block, x) : block(x)).sum();
    if (!outside_first) loss = loss + at::linear(x, w).to(at::kFloat).sum();
    const at::Tensor found = torch::autograd::grad({loss}, {w})[0];  // within the region: the cache is not empty
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return found;
  };
  for (const bool outside_first : {true, false}) {
    REQUIRE(at::allclose(gradient(true, outside_first), gradient(false, outside_first), 1e-2, 1e-2));
  }
}

TEST_CASE("a block that does not compute the same thing twice is refused by what differs", "[nn][cpu]") {
  const at::Tensor w = at::randn({3, 5}).requires_grad_(), x = at::randn({2, 3}).requires_grad_();
  const auto refused = [&](auto block, const std::string& why) {
    const at::Tensor y = checkpoint(block, x);
    REQUIRE_THROWS_WITH(torch::autograd::backward({y.sum()}, {}), Catch::Matchers::ContainsSubstring(why));
  };
  const auto calls = std::make_shared<int>(0);
  const auto again = [calls] { return ++*calls % 2 == 0; };
  refused(
      [=](const at::Tensor& input) {
        return again() ? input.matmul(w) : input.matmul(at::ones({3, 5}));
      },
      "uses a tensor of shape [3, 5]");
  refused(
      [=](const at::Tensor& input) {
        return again() ? input.matmul(at::ones({3, 5})) : input.matmul(w);
      },
      "does not use a tensor of shape [3, 5]");
  refused([=](const at::Tensor& input) { return again() ? input.matmul(w).sum(0) : input.matmul(w); }, "has shape [5]");
  REQUIRE_THROWS_WITH(checkpoint([](const at::Tensor& input) { return at::Tensor(input).add_(1); }, at::randn({2, 3})),
                      Catch::Matchers::ContainsSubstring("changed input 0 in place"));
}

TEST_CASE("a step's peak is that of its backward: the first run keeps its graph no longer than it runs", "[nn][cpu]") {
  /// Bytes of CPU tensors that live at once.
  struct Live : c10::MemoryReportingInfoBase {
    int64_t now = 0, peak = 0;
    void reportMemoryUsage(void* /*pointer*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/, c10::Device) override {
      now += bytes;
      peak = std::max(peak, now);
    }
    [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  };
  const auto live = std::make_shared<Live>();
  const at::Tensor w = at::eye(256).requires_grad_(), x = at::randn({256, 256});  // 256 KiB each
  const auto block = [w](at::Tensor h) {
    for (int i = 0; i < 8; ++i) h = h.matmul(w).tanh();
    return h;
  };
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, live);
  at::Tensor y = x;
  for (int i = 0; i < 4; ++i) y = checkpoint(block, y);
  const int64_t kept = live->now, forward_peak = live->peak;
  REQUIRE(kept < 5 * 256 * 1024);  // four outputs, and nothing of the blocks
  torch::autograd::backward({y.sum()}, {});
  REQUIRE(forward_peak <= live->peak);
}

namespace {

/// Two LoraLinear layers with dropout; the first one's output may be changed in place by what follows.
struct TwoLayers {
  std::shared_ptr<LoraLinear> first, second;
  bool in_place = false;

  static std::shared_ptr<LoraLinear> layer(int64_t out, int64_t in) {
    const QuantizedTensor weight = Quantizer().quantize(at::randn({out, in}) * 0.1);
    auto linear = std::make_shared<LoraLinear>(FrozenWeight(weight), LoraLinear::Options{.r = 4, .lora_dropout = 0.3}, 7);
    const at::NoGradGuard no_grad;
    linear->b().normal_();
    return linear;
  }
  explicit TwoLayers(bool changes_in_place) : first(layer(128, 64)), second(layer(64, 128)), in_place(changes_in_place) {}

  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor hidden = first->forward(x, true);
    hidden = in_place ? hidden.relu_() : hidden.relu();
    return second->forward(hidden, true) + x;
  }
};

int products = 0;  // of a four-bit weight, counted by CountProducts

/// Counts the forward products of four-bit weights on this thread.
class CountProducts {
 public:
  CountProducts() {
    products = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                           if (std::string(function.name()).starts_with("qlorapp::linear_4bit")) ++products;
                                           return std::unique_ptr<at::ObserverContext>();
                                         }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountProducts() { at::removeCallback(handle_); }
  CountProducts(const CountProducts&) = delete;
  CountProducts& operator=(const CountProducts&) = delete;

 private:
  at::CallbackHandle handle_;
};

}  // namespace

TEST_CASE("kept outputs of LoraLinear layers spare the recompute their products and change no bit", "[nn][cpu]") {
  const bool in_place = GENERATE(false, true);
  TwoLayers block(in_place);
  const at::Tensor x = at::randn({10, 64}).requires_grad_();
  const std::vector<at::Tensor> wanted{x, block.first->a(), block.first->b(), block.second->a(), block.second->b()};
  const auto run = [&](auto layers) {
    const CountProducts count;
    return std::pair(gradients(layers, x, wanted), products);
  };
  const int one = [&] {  // an operator may call itself below autograd
    const CountProducts count;
    static_cast<void>(block.first->forward(x, true));
    return products;
  }();
  REQUIRE(one > 0);
  const auto [plain, plain_products] = run(block);
  const auto [again, again_products] = run(CheckpointedBlock(block));
  const auto [kept, kept_products] = run(CheckpointedBlock(block, {.keep_linear_outputs = true}));
  REQUIRE(again_products == plain_products + 2 * one);
  REQUIRE(kept_products == plain_products + (in_place ? one : 0));  // an output that was changed is computed again
  for (size_t i = 0; i < wanted.size(); ++i) {
    REQUIRE(at::equal(plain[i], again[i]));
    REQUIRE(at::equal(plain[i], kept[i]));
  }
}

TEST_CASE("a block that keeps outputs can run backward twice, nest, and frees what it kept", "[nn][cpu]") {
  TwoLayers block(false);
  const auto loss_of = [&](const at::Tensor& x) {
    at::manual_seed(3);
    const CheckpointedBlock inner(block, {.keep_linear_outputs = true});
    return checkpoint([inner](const at::Tensor& rows) { return inner.forward(rows); }, x).square().sum();
  };
  const at::Tensor x = at::randn({6, 64}).requires_grad_();
  const at::Tensor a = block.first->a();
  at::manual_seed(3);
  const at::Tensor plain = torch::autograd::grad({block.forward(x).square().sum()}, {a})[0];
  const at::Tensor loss = loss_of(x);
  const at::Tensor once = torch::autograd::grad({loss}, {a}, {}, /*retain_graph=*/true)[0];
  const at::Tensor twice = torch::autograd::grad({loss}, {a})[0];
  REQUIRE(at::equal(plain, once));
  REQUIRE(at::equal(plain, twice));
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
