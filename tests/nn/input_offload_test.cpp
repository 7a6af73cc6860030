// SPDX-License-Identifier: Apache-2.0
#include "nn/input_offload.hpp"
#include "nn/decoder.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"

using namespace qlorapp;

namespace {

struct Result {
  at::Tensor loss, gradients;
};

Result train(CausalLM& model, const std::vector<Batch>& batches) {
  model.arena().zero_grad();
  Result result{at::zeros({}, at::TensorOptions().device(model.device())), {}};
  uint32_t micro_step = 5;
  const at::Tensor one = at::ones({}, at::TensorOptions().device(model.device()));
  for (const Batch& batch : batches) result.loss += model.forward_backward(batch, one, {3, micro_step++}).loss;
  result.gradients = model.arena().gradients().clone();
  return result;
}

/// All losses first and then their backward passes, last one first: every graph has its inputs on the host at once.
Result train_under_autograd(CausalLM& model, const std::vector<Batch>& batches) {
  model.arena().zero_grad();
  std::vector<at::Tensor> losses;
  uint32_t micro_step = 5;
  for (const Batch& batch : batches) losses.push_back(model.loss(batch, 3, micro_step++));
  Result result{at::zeros({}, at::TensorOptions().device(model.device())), {}};
  for (const at::Tensor& loss : losses) result.loss += loss.detach();
  while (!losses.empty()) {
    torch::autograd::backward({losses.back()}, {});
    losses.pop_back();
  }
  result.gradients = model.arena().gradients().clone();
  return result;
}

std::vector<Batch> batches_on(at::Device device, int64_t vocabulary) {
  const Batch ragged = tiny::make_batch(vocabulary);
  const Batch shorter{ragged.tokens.narrow(0, 0, 10).clone(),
                      ragged.targets.narrow(0, 0, 10).clone(),
                      ragged.positions.narrow(0, 0, 10).clone(),
                      {0, 9, 10},
                      6};
  return {ragged.to(device), shorter.to(device)};
}

Batch long_offload_batch(at::Device device, int64_t vocabulary, int64_t rows, int64_t length) {
  Batch batch;
  batch.tokens = at::randint(vocabulary, {rows * length}, at::kLong);
  batch.targets = at::randint(vocabulary, {rows * length}, at::kLong);
  batch.positions = at::arange(length, at::kLong).repeat({rows});
  for (int64_t row = 0; row <= rows; ++row) batch.row_starts.push_back(row * length);
  batch.target_count = rows * length;
  return batch.to(device);
}

}  // namespace

TEST_CASE("inputs on the host change no bit of loss or gradients, whatever other blocks keep", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  CausalLM model = tiny::make_model(dtype, /*dropout=*/0.2, device);
  const auto batches = batches_on(device, model.config().vocab_size);
  model.settings().set_segments(keep_in_each_block(4, Keep::kInputOnly));
  const Result expected = train(model, batches);
  REQUIRE(at::equal(train(model, batches).gradients, expected.gradients));  // else the rest would say nothing
  for (const auto& segments :
       {keep_in_each_block(4, Keep::kInputOnHost), checkpoint_every(4, 2, Keep::kInputOnHost),
        checkpoint_every(4, 3, Keep::kInputOnHost),
        std::vector<Segment>{
            {0, 1, Keep::kInputOnHost}, {1, 2, Keep::kEverything}, {2, 3, Keep::kInputOnHost}, {3, 4, Keep::kAttentionOnly}},
        std::vector<Segment>{{0, 1, Keep::kInputOnly}, {1, 3, Keep::kInputOnHost}, {3, 4, Keep::kEverything}}}) {
    model.settings().set_segments(segments);
    REQUIRE((model.settings().pinned_ring() != nullptr) == device.is_cuda());
    const Result ours = train(model, batches);
    REQUIRE(at::equal(ours.loss, expected.loss));
    REQUIRE(at::equal(ours.gradients, expected.gradients));
  }
}

TEST_CASE("inputs on the host work on graphs: several alive at once, and backward twice", "[nn][cpu]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, /*dropout=*/0, device);
  const auto batches = batches_on(device, model.config().vocab_size);
  model.settings().set_segments(keep_in_each_block(4, Keep::kInputOnly));
  const Result expected = train_under_autograd(model, batches);
  for (const auto& segments : {keep_in_each_block(4, Keep::kInputOnHost), checkpoint_every(4, 2, Keep::kInputOnHost)}) {
    model.settings().set_segments(segments);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Result ours = train_under_autograd(model, batches);
      REQUIRE(at::equal(ours.loss, expected.loss));
      REQUIRE(at::equal(ours.gradients, expected.gradients));
    }
    const at::Tensor loss = model.loss(batches[0], 3, 5);
    const auto& parameters = model.arena().parameters();
    const auto first = torch::autograd::grad({loss}, parameters, {}, /*retain_graph=*/true);
    const auto second = torch::autograd::grad({loss}, parameters, {});
    for (size_t i = 0; i < first.size(); ++i) REQUIRE(at::equal(first[i], second[i]));
  }
}

TEST_CASE("on a GPU inputs on the host free what they would keep, and nothing is allocated from the second step on", "[nn][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  constexpr int64_t kBlocks = 12;
  CausalLM model = tiny::make_model(at::kBFloat16, /*dropout=*/0, device, kBlocks);
  const int64_t rows = 4, length = 2048, tokens = rows * length;
  const std::vector<Batch> window(2, long_offload_batch(device, model.config().vocab_size, rows, length));
  auto* const allocator = c10::getDeviceAllocator(at::kCUDA);
  const auto peak = [&](Keep keep) {
    model.settings().set_segments(keep_in_each_block(kBlocks, keep));
    train(model, window);
    allocator->resetPeakStats(0);
    const int64_t before = allocator->getDeviceStats(0).num_device_alloc;
    const int64_t pinned = model.settings().pinned_ring() ? model.settings().pinned_ring()->allocations() : 0;
    for (int step = 0; step < 3; ++step) train(model, window);
    REQUIRE(allocator->getDeviceStats(0).num_device_alloc == before);
    if (model.settings().pinned_ring()) REQUIRE(model.settings().pinned_ring()->allocations() == pinned);
    return allocator->getDeviceStats(0).allocated_bytes[0].peak;
  };
  const int64_t on_device = peak(Keep::kInputOnly), on_host = peak(Keep::kInputOnHost);
  const int64_t input = model.blocks()[0].kept_bytes(tokens, Keep::kInputOnly, at::kBFloat16).count;
  // The last block's input stays. In a block this small the widest point is not the MLP but attention's backward pass, during
  // which one more input is being loaded, and blocks differ by less than an input.
  const int64_t fallen = on_device - on_host;
  INFO("peak " << on_device << " fell by " << fallen << ", an input has " << input);
  REQUIRE(fallen >= (kBlocks - 3) * input);
  REQUIRE(fallen <= (kBlocks - 1) * input + 4096);
  // The slots are used by one micro-batch after the other; they are powers of two.
  REQUIRE(model.settings().pinned_ring()->allocations() == kBlocks - 1);
  REQUIRE(model.settings().pinned_ring()->nbytes().count >= (kBlocks - 1) * input);
  REQUIRE(model.settings().pinned_ring()->nbytes().count <= 2 * (kBlocks - 1) * input);

  // The same for a user's own loop, whose last graph is still there when the next one begins.
  at::Tensor loss;
  for (int step = 0; step < 4; ++step) {
    loss = model.loss(window[0], 0, 0);
    torch::autograd::backward({loss}, {});
  }
  REQUIRE(model.settings().pinned_ring()->allocations() == kBlocks - 1);
}

TEST_CASE("a ring takes longer batches by growing and gives shorter ones what it has", "[nn][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  CausalLM model = tiny::make_model(at::kFloat, /*dropout=*/0, device);
  model.settings().set_segments(keep_in_each_block(4, Keep::kInputOnHost));
  std::vector<int64_t> allocations;
  for (const int64_t length : {100, 400, 300, 100, 400}) {
    train(model, {long_offload_batch(device, model.config().vocab_size, 1, length)});
    allocations.push_back(model.settings().pinned_ring()->allocations());
  }
  REQUIRE(allocations == std::vector<int64_t>{3, 6, 6, 6, 6});
  // 100 and 400 rows of 48 float32 in powers of two; the small slots went as the large ones came.
  REQUIRE(model.settings().pinned_ring()->nbytes().count == 3 * (int64_t{1} << 17));
}

TEST_CASE("a ring is refused for a CPU, whose memory is the host's", "[nn][cpu]") {
  REQUIRE_THROWS_AS(PinnedRing(at::kCPU), ValueError);
}
