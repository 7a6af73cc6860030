// SPDX-License-Identifier: Apache-2.0
#include "nn/block/decoder_block.hpp"
#include "nn/input_offload.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "nn/tiny_block.hpp"

using namespace qlorapp;

namespace {

struct Run {
  at::Tensor y, dx;
  DecoderBlock::Gradients gradients;
  Bytes kept, kept_on_host;
};

Run run(const DecoderBlock& block, const StepContext& context, const at::Tensor& x, const at::Tensor& dy, Keep keep) {
  const at::NoGradGuard no_grad;
  Run result;
  Saved saved;
  result.y = block.forward(x, context, &saved, keep);
  result.kept = saved.nbytes();
  result.kept_on_host = saved.host_nbytes();
  result.gradients = tiny::zero_gradients(block);
  result.dx = block.backward({dy, dy.size(1)}, context, std::move(saved), result.gradients, /*need_dx=*/true).values();
  return result;
}

const std::vector<int64_t> kRows{0, 5, 6, 17};

struct Option {
  const char* name;
  void (*set)(reference::Block&);
};

reference::Values random_values(int64_t n) { return tests::values(at::rand({n}, at::kDouble) + 0.5); }

/// What families other than Llama do, one after the other, and what one of them does together.
const std::vector<Option>& options() {
  using reference::Block;
  static const std::vector<Option> all{
      {"Llama", [](Block&) {}},
      {"1 + weight", [](Block& b) { b.one_plus = true; }},
      {"biases",
       [](Block& b) {
         for (size_t i = 0; i < 7; ++i) b.bias[i] = random_values(b.weights[i].rows());
       }},
      {"norms of heads", [](Block& b) { b.q_norm = random_values(b.head_dim), b.k_norm = random_values(b.head_dim); }},
      {"norms behind the parts", [](Block& b) { b.after_attention = random_values(48), b.after_mlp = random_values(48); }},
      {"norms behind the parts alone",
       [](Block& b) {
         b.after_attention = std::exchange(b.input_norm, {});
         b.after_mlp = std::exchange(b.post_attention_norm, {});
       }},
      {"scales", [](Block& b) { b.attention_scale = 0.11, b.residual_factor = 0.7; }},
      {"window", [](Block& b) { b.window = 3; }},
      {"interleaved pairs", [](Block& b) { b.rotary.interleaved = true; }},
      {"half of the pairs", [](Block& b) { b.rotary.width = b.head_dim / 2; }},
      {"norms of all heads as one", [](Block& b) { b.q_norm = random_values(48), b.k_norm = random_values(16); }},
      {"norms of turned heads",
       [](Block& b) {
         b.turns_before_norm = true;
         b.q_norm = random_values(b.head_dim), b.k_norm = random_values(b.head_dim);
       }},
      {"GLM-4's",
       [](Block& b) {
         b.rotary = {b.head_dim / 2, true};
         b.after_attention = random_values(48), b.after_mlp = random_values(48);
         for (size_t i = 0; i < 3; ++i) b.bias[i] = random_values(b.weights[i].rows());
       }},
      {"tanh-GELU", [](Block& b) { b.activation = reference::Activation::kGeluTanh; }},
      {"Gemma 3's",
       [](Block& b) {
         b.one_plus = true;
         b.q_norm = random_values(b.head_dim), b.k_norm = random_values(b.head_dim);
         b.after_attention = random_values(48), b.after_mlp = random_values(48);
         b.window = 4;
         b.activation = reference::Activation::kGeluTanh;
       }},
  };
  return all;
}

/// Where inputs go that are kept on the host; a CPU has no such place.
std::shared_ptr<InputOffload> offload_of(at::Device device) {
  return device.is_cpu() ? nullptr : std::make_shared<InputOffload>(std::make_shared<PinnedRing>(device));
}

}  // namespace

TEST_CASE("the gradients of the plain dense block are the slopes of its output", "[nn][cpu]") {
  const std::array<bool, 7> targets = GENERATE(std::array<bool, 7>{true, true, true, true, true, true, true},
                                               std::array<bool, 7>{true, false, false, true, false, true, false});
  reference::Block block = tiny::make_block(at::kDouble, targets).reference;
  const auto [name, option] = GENERATE(from_range(options()));
  CAPTURE(name);
  option(block);
  const reference::Rows rows = tiny::reference_rows(tiny::make_context(kRows, tiny::kShape, block.rotary.width));
  reference::Matrix x = tiny::matrix(at::randn({17, 48}, at::kDouble));
  const reference::Matrix dy = tiny::matrix(at::randn({17, 48}, at::kDouble));
  const auto gradients = reference::backward(block, x, rows, dy);
  // Along a random direction from a place, which changes every element of it at once.
  const auto require_slope = [&](reference::Matrix& place, const reference::Matrix& gradient) {
    const reference::Matrix middle = place, direction = tiny::matrix(at::randn({place.rows(), place.cols()}, at::kDouble));
    const auto at_distance = [&](double distance) {
      place = middle + distance * direction;
      return reference::forward(block, x, rows).cwiseProduct(dy).sum();
    };
    const double slope = (at_distance(1e-5) - at_distance(-1e-5)) / 2e-5;
    place = middle;
    REQUIRE(std::abs(slope - gradient.cwiseProduct(direction).sum()) < 1e-7 * gradient.norm() * direction.norm());
  };
  require_slope(x, gradients.x);
  for (size_t i = 0; i < 7; ++i) {
    CAPTURE(i);
    REQUIRE((gradients.lora[i].a.size() > 0) == targets[i]);
    if (!targets[i]) continue;
    require_slope(block.lora[i].a, gradients.lora[i].a);
    require_slope(block.lora[i].b, gradients.lora[i].b);
  }
}

TEST_CASE("the gradients of the plain dense model are the slopes of its loss", "[nn][cpu]") {
  const auto logits = GENERATE(reference::Logits{}, reference::Logits{0.5, 0}, reference::Logits{2, 3});
  reference::Model model{tiny::matrix(at::randn({31, 48}, at::kDouble)),
                         {},
                         random_values(48),
                         1e-5,
                         tiny::matrix(at::randn({31, 48}, at::kDouble) * 0.3),
                         /*one_plus=*/true,
                         /*embedding_factor=*/1.7,
                         logits};
  for (int i = 0; i < 2; ++i) model.blocks.push_back(tiny::make_block(at::kDouble).reference);
  std::vector<reference::Rows> rows(2, tiny::reference_rows(tiny::make_context(kRows)));
  std::swap(rows[1].cos, rows[1].sin);  // another table: turned by a quarter less
  const std::vector<int64_t> tokens = tiny::integers(at::randint(31, {17}, at::kLong));
  std::vector<int64_t> targets = tiny::integers(at::randint(31, {17}, at::kLong));
  targets[2] = targets[9] = -100;
  const auto gradients = reference::loss_and_gradients(model, tokens, targets, rows);
  for (size_t block = 0; block < 2; ++block) {
    for (size_t i = 0; i < 7; ++i) {
      reference::Matrix& place = model.blocks[block].lora[i].b;
      const reference::Matrix middle = place, direction = tiny::matrix(at::randn({place.rows(), place.cols()}, at::kDouble));
      const auto at_distance = [&](double distance) {
        place = middle + distance * direction;
        return reference::loss_and_gradients(model, tokens, targets, rows).loss;
      };
      const double slope = (at_distance(1e-5) - at_distance(-1e-5)) / 2e-5;
      place = middle;
      const reference::Matrix& gradient = gradients.blocks[block].lora[i].b;
      REQUIRE(std::abs(slope - gradient.cwiseProduct(direction).sum()) < 1e-6 * gradient.norm() * direction.norm());
    }
  }
}

TEST_CASE("a block's output and gradients equal those of a plain dense block in double precision", "[nn][cpu]") {
  const auto [name, option] = GENERATE(from_range(options()));
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat);
  const double tolerance = dtype == at::kDouble ? 1e-10 : 5e-6;
  const Keep keep = GENERATE(Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly);
  const std::array<bool, 7> targets = GENERATE(std::array<bool, 7>{true, true, true, true, true, true, true},
                                               std::array<bool, 7>{true, false, true, false, false, false, false},
                                               std::array<bool, 7>{false, false, false, false, true, false, true});
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const bool stacked = GENERATE(false, true), in_tiles = GENERATE(false, true);
  if ((device.is_cuda() || stacked) && dtype == at::kDouble) return;  // which kernels for GPUs and stacks do not take
  auto [block, dense] = tiny::make_block(dtype, targets, 4, 0, tiny::kShape, option);
  StepContext context = tiny::make_context(kRows, tiny::kShape, dense.rotary.width);
  context.stacked = stacked;
  context.memory.mlp_tile_rows = in_tiles ? 7 : 0;
  const at::Tensor x = at::randn({17, 48}, dtype), dy = at::randn({17, 48}, dtype);
  CAPTURE(name, dtype, device, stacked, in_tiles, static_cast<int>(keep));

  const reference::Matrix expected = reference::forward(dense, tiny::matrix(x), tiny::reference_rows(context));
  const auto oracle = reference::backward(dense, tiny::matrix(x), tiny::reference_rows(context), tiny::matrix(dy));

  const Run ours = run(tiny::on(device, block), tiny::on(device, context), x.to(device), dy.to(device), keep);
  REQUIRE(tiny::relative_error(ours.y, expected) < tolerance);
  REQUIRE(tiny::relative_error(ours.dx, oracle.x) < tolerance);
  for (size_t i = 0; i < 7; ++i) {
    if (!targets[i]) continue;
    REQUIRE(tiny::relative_error(ours.gradients[i].a, oracle.lora[i].a) < tolerance);
    REQUIRE(tiny::relative_error(ours.gradients[i].b, oracle.lora[i].b) < tolerance);
  }
}

TEST_CASE("ranks and scalings of their own within one stack give the gradients of the plain dense block", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const bool stacked = GENERATE(false, true);
  auto [block, dense] = tiny::make_block(at::kFloat);
  const std::array<int64_t, 7> ranks{2, 7, 3, 1, 5, 70, 16};  // q, k, v together; gate and up together, beyond one step of padding
  for (size_t i = 0; i < 7; ++i) {
    const int64_t in = dense.weights[i].cols(), out = dense.weights[i].rows();
    const at::Tensor a = at::randn({ranks[i], in}) * 0.1, b = at::randn({out, ranks[i]}) * 0.1;
    const double scaling = 0.5 + static_cast<double>(i);
    block.adapters()[i] = LoraAdapter{a, b, scaling, 0.0};
    dense.lora[i] = {tiny::matrix(a), tiny::matrix(b), scaling};
  }
  StepContext context = tiny::make_context(kRows);
  context.stacked = stacked;
  const at::Tensor x = at::randn({17, 48}), dy = at::randn({17, 48});
  const reference::Matrix expected = reference::forward(dense, tiny::matrix(x), tiny::reference_rows(context));
  const auto oracle = reference::backward(dense, tiny::matrix(x), tiny::reference_rows(context), tiny::matrix(dy));

  const Run ours = run(tiny::on(device, block), tiny::on(device, context), x.to(device), dy.to(device), Keep::kEverything);
  REQUIRE(tiny::relative_error(ours.y, expected) < 5e-6);
  REQUIRE(tiny::relative_error(ours.dx, oracle.x) < 5e-6);
  for (size_t i = 0; i < 7; ++i) {
    REQUIRE(tiny::relative_error(ours.gradients[i].a, oracle.lora[i].a) < 5e-6);
    REQUIRE(tiny::relative_error(ours.gradients[i].b, oracle.lora[i].b) < 5e-6);
  }
}

namespace {

/// The same block, whose stream is stored times 1/128.
DecoderBlock scaled(const DecoderBlock& block) {
  DecoderBlock::Shape shape = block.shape();
  shape.stream_scale = 1.0 / 128;
  DecoderBlock result(shape, block.weights(), block.index());
  result.adapters() = block.adapters();
  return result;
}

}  // namespace

TEST_CASE("a stream that is stored times a power of two has the same output and gradients, times it", "[nn][cpu]") {
  const Keep keep = GENERATE(Keep::kEverything, Keep::kInputOnly);
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const auto [name, option] = GENERATE(from_range(options()));
  const auto [block, dense] =
      tiny::make_block(at::kFloat, {true, true, true, true, true, true, true}, 4, 0.0, tiny::kShape, option);
  if (dense.input_norm.empty()) return;  // its parts read the stream as it is
  const StepContext context = tiny::make_context(kRows, tiny::kShape, dense.rotary.width);
  const at::Tensor x = at::randn({17, 48}), dy = at::randn({17, 48});
  CAPTURE(name, device, static_cast<int>(keep));
  const reference::Matrix expected = reference::forward(dense, tiny::matrix(x), tiny::reference_rows(context));
  const auto oracle = reference::backward(dense, tiny::matrix(x), tiny::reference_rows(context), tiny::matrix(dy));
  const Run ours =
      run(tiny::on(device, scaled(block)), tiny::on(device, context), (x / 128).to(device), (dy * 128).to(device), keep);
  REQUIRE(tiny::relative_error(ours.y * 128, expected) < 5e-6);
  REQUIRE(tiny::relative_error(ours.dx / 128, oracle.x) < 5e-6);
  for (size_t i = 0; i < 7; ++i) {
    REQUIRE(tiny::relative_error(ours.gradients[i].a, oracle.lora[i].a) < 5e-6);
    REQUIRE(tiny::relative_error(ours.gradients[i].b, oracle.lora[i].b) < 5e-6);
  }
}

TEST_CASE("a stream beyond float16's largest number is held if it is stored times a power of two", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CAPTURE(device);
  const auto large = [](reference::Block& b) {
    b.one_plus = true;
    b.after_attention = tests::values(at::full({48}, 3e4, at::kDouble));
    b.after_mlp = tests::values(at::full({48}, 6e4, at::kDouble));
  };
  const auto [block, dense] = tiny::make_block(at::kHalf, {true, true, true, true, true, true, true}, 4, 0.0, tiny::kShape, large);
  const StepContext context = tiny::make_context(kRows);
  const at::Tensor x = at::randn({17, 48}), dy = at::randn({17, 48}).mul_(1e-5);
  const auto on_device = [&](const at::Tensor& tensor) { return tensor.to(at::kHalf).to(device); };
  const Run plain = run(tiny::on(device, block), tiny::on(device, context), on_device(x), on_device(dy), Keep::kEverything);
  REQUIRE(!plain.y.isfinite().all().item<bool>());
  const Run held =
      run(tiny::on(device, scaled(block)), tiny::on(device, context), on_device(x / 128), on_device(dy * 128), Keep::kEverything);
  REQUIRE(tiny::relative_error(held.y.to(at::kDouble) * 128,
                               reference::forward(dense, tiny::matrix(x), tiny::reference_rows(context))) < 5e-3);
  REQUIRE(held.dx.isfinite().all().item<bool>());
  for (size_t i = 0; i < 7; ++i) REQUIRE(held.gradients[i].b.isfinite().all().item<bool>());
}

TEST_CASE("keeping less changes no bit of output or gradient, with dropout or in stacks", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const bool stacked = GENERATE(false, true);
  const auto [name, option] = GENERATE(from_range(options()));
  CAPTURE(name);
  const auto both =
      tiny::make_block(dtype, {true, true, true, true, true, true, true}, 4, stacked ? 0.0 : 0.3, tiny::kShape, option);
  const DecoderBlock block = tiny::on(device, both.ours);
  StepContext context = tiny::on(device, tiny::make_context(kRows));
  context.stacked = stacked;
  const at::Tensor x = at::randn({17, 48}).to(dtype).to(device), dy = at::randn({17, 48}).to(dtype).to(device);
  const Run all = run(block, context, x, dy, Keep::kEverything);
  context.offload = offload_of(device);
  for (const Keep keep : {Keep::kAttentionOnly, Keep::kInputOnly, Keep::kInputOnHost}) {
    const Run less = run(block, context, x, dy, keep);
    CAPTURE(dtype, device, stacked, static_cast<int>(keep));
    REQUIRE(at::equal(less.y, all.y));
    REQUIRE(at::equal(less.dx, all.dx));
    for (size_t i = 0; i < 7; ++i) {
      CAPTURE(i);
      REQUIRE(at::equal(less.gradients[i].a, all.gradients[i].a));
      REQUIRE(at::equal(less.gradients[i].b, all.gradients[i].b));
    }
  }
}

TEST_CASE("kept_bytes says what forward keeps, to the byte", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const Keep keep = GENERATE(Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly);
  const auto [name, option] = GENERATE(from_range(options()));
  CAPTURE(name);
  auto [block, dense] = tiny::make_block(dtype, {true, true, false, true, true, false, true}, 4, 0, tiny::kShape, option);
  StepContext context = tiny::make_context(kRows);
  context.stacked = GENERATE(false, true);
  const Run ours = run(block, context, at::randn({17, 48}).to(dtype), at::randn({17, 48}).to(dtype), keep);
  REQUIRE(ours.kept.count == block.kept_bytes(17, keep, dtype, context.stacked).count);
}

TEST_CASE("input_on_host keeps the input in host memory and nothing on a GPU; on a CPU they are one", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const at::Device device = GENERATE(from_range(tiny::devices()));
  auto [block, dense] = tiny::make_block(dtype);
  StepContext context = tiny::on(device, tiny::make_context(kRows));
  context.offload = offload_of(device);
  const at::Tensor x = at::randn({17, 48}).to(dtype).to(device), dy = at::randn({17, 48}).to(dtype).to(device);
  const Run ours = run(tiny::on(device, block), context, x, dy, Keep::kInputOnHost);
  const Bytes on_device = block.kept_bytes(17, Keep::kInputOnHost, dtype);
  const Bytes on_host{17 * 48 * static_cast<int64_t>(c10::elementSize(dtype))};  // the input
  REQUIRE(on_device.count == 0);
  REQUIRE(ours.kept + ours.kept_on_host == on_device + on_host);
  REQUIRE(ours.kept_on_host == (device.is_cpu() ? Bytes{} : on_host));
}

TEST_CASE("dropout changes with the micro-step and vanishes in evaluation", "[nn][cpu]") {
  auto [block, dense] = tiny::make_block(at::kFloat, {true, true, true, true, true, true, true}, 4, 0.5);
  StepContext context = tiny::make_context(kRows);
  const at::Tensor x = at::randn({17, 48});
  const at::Tensor first = block.forward(x, context, nullptr, Keep::kInputOnly);
  REQUIRE(at::equal(first, block.forward(x, context, nullptr, Keep::kInputOnly)));
  context.micro_step = 1;
  REQUIRE_FALSE(at::equal(first, block.forward(x, context, nullptr, Keep::kInputOnly)));
  context.training = false;
  const reference::Matrix expected = reference::forward(dense, tiny::matrix(x), tiny::reference_rows(context));
  REQUIRE(tiny::relative_error(block.forward(x, context, nullptr, Keep::kInputOnly), expected) < 5e-6);
}

TEST_CASE("a cache fed token by token gives what the whole row gives", "[nn][cpu]") {
  const auto [name, option] = GENERATE(from_range(options()));
  CAPTURE(name);
  auto [block, dense] = tiny::make_block(at::kFloat, {true, true, true, true, true, true, true}, 4, 0, tiny::kShape, option);
  StepContext context = tiny::make_context({0, 9});
  const at::Tensor x = at::randn({9, 48});
  const at::Tensor whole = block.forward(x, context, nullptr, Keep::kInputOnly);
  KeyValueCache cache{at::empty({9, 2, 8}), at::empty({9, 2, 8})};
  std::vector<at::Tensor> parts;
  for (const auto& [begin, count] : std::vector<std::pair<int64_t, int64_t>>{{0, 4}, {4, 1}, {5, 3}, {8, 1}}) {
    StepContext step = context;
    step.training = false;
    step.positions = at::arange(begin, begin + count, at::kLong);
    step.row_starts = {0, count};
    const CacheRows rows{.starts = {0}, .lengths = {begin + count}, .slots = step.positions};
    const BlockCache of_block{rows, cache};
    parts.push_back(block.forward(x.narrow(0, begin, count), step, nullptr, Keep::kInputOnly, &of_block));
  }
  REQUIRE(tiny::relative_error(at::cat(parts), whole) < 1e-6);
}

TEST_CASE("a gradient that nobody else holds is overwritten if it has room behind it, and any other is left alone", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const auto both = tiny::make_block(at::kFloat, {true, true, true, true, true, true, true});
  const DecoderBlock block = tiny::on(device, both.ours);
  StepContext context = tiny::on(device, tiny::make_context(kRows));
  context.stacked = GENERATE(false, true);
  const at::Tensor x = at::randn({17, 48}).to(device), dy = at::randn({17, 48}).to(device), before = dy.clone();
  const Run expected = run(block, context, x, dy, Keep::kEverything);
  REQUIRE(at::equal(dy, before));

  const at::NoGradGuard no_grad;
  const int64_t room = GENERATE(0, 8, 64, 80);
  Wide ours{at::full({17, 48 + room}, NAN, dy.options()), 48};
  ours.values().copy_(dy);
  const void* const memory = ours.buffer.const_data_ptr();
  Saved saved;
  const at::Tensor y = block.forward(x, context, &saved, Keep::kEverything);
  DecoderBlock::Gradients gradients = tiny::zero_gradients(block);
  const Wide dx = block.backward(std::move(ours), context, std::move(saved), gradients, /*need_dx=*/true);
  REQUIRE(at::equal(dx.values(), expected.dx));
  for (size_t i = 0; i < 7; ++i) {
    REQUIRE(at::equal(gradients[i].a, expected.gradients[i].a));
    REQUIRE(at::equal(gradients[i].b, expected.gradients[i].b));
  }
  REQUIRE((dx.buffer.const_data_ptr() == memory) == (room >= (context.stacked ? 64 : 0)));
}

TEST_CASE("gradients of A that lie together in memory are formed by one product, and are the same", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const auto both = tiny::make_block(at::kFloat, {true, true, false, true, true, true, true});
  const DecoderBlock block = tiny::on(device, both.ours);
  StepContext context = tiny::on(device, tiny::make_context(kRows));
  context.stacked = true;
  const at::Tensor x = at::randn({17, 48}).to(device), dy = at::randn({17, 48}).to(device);
  const Run apart = run(block, context, x, dy, Keep::kEverything);

  const at::NoGradGuard no_grad;
  const at::Tensor flat = at::zeros({7 * 4 * 88}, x.options());
  DecoderBlock::Gradients together = tiny::zero_gradients(block);
  int64_t offset = 0;
  for (size_t i = 0; i < 7; ++i) {
    if (!together[i].a.defined()) continue;
    const int64_t numel = together[i].a.numel();
    together[i].a = flat.narrow(0, offset, numel).view(apart.gradients[i].a.sizes());
    offset += numel;
  }
  Saved saved;
  const at::Tensor y = block.forward(x, context, &saved, Keep::kEverything);
  const at::Tensor dx = block.backward({dy, dy.size(1)}, context, std::move(saved), together, /*need_dx=*/true).values();
  REQUIRE(at::equal(dx, apart.dx));
  for (size_t i = 0; i < 7; ++i) {
    if (together[i].a.defined()) REQUIRE(tiny::relative_error(together[i].a, apart.gradients[i].a) < 1e-6);
  }
}
