// SPDX-License-Identifier: Apache-2.0
// What a micro-step on a GPU promises beside its numbers. Without a GPU these say so and pass over.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <atomic>
#include <cmath>
#include <memory>

#include "catch.hpp"
#include "nn/tiny_model.hpp"

using namespace qlorapp;

namespace {

const at::Device kGpu(at::kCUDA, 0);

/// Enough tokens that projections are stacked.
Batch long_batch(const std::vector<int64_t>& row_starts, int64_t vocabulary) {
  at::manual_seed(6);
  Batch batch;
  batch.row_starts = row_starts;
  std::vector<at::Tensor> positions;
  for (size_t r = 0; r + 1 < row_starts.size(); ++r) positions.push_back(at::arange(row_starts[r + 1] - row_starts[r], at::kLong));
  batch.positions = at::cat(positions);
  batch.tokens = at::randint(vocabulary, {row_starts.back()}, at::kLong);
  batch.targets = at::randint(vocabulary, {row_starts.back()}, at::kLong);
  for (const int64_t ignored : {int64_t{0}, int64_t{3}, row_starts.back() - 1}) batch.targets[ignored] = -100;
  batch.target_count = row_starts.back() - 3;
  return batch;
}

bool no_gpu() {
  if (!has_gpu()) WARN("no GPU here: not tested");
  return !has_gpu();
}

/// The fastest settings, and those that save memory.
const std::vector<MemorySettings> kSettings{
    {}, {40, 32, WeightWorkspace::kStack, true}, {40, 32, WeightWorkspace::kProjection, true}};

/// While it lives, everything that waits for the GPU throws.
struct NothingWaits {
  NothingWaits() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NothingWaits() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

}  // namespace

TEST_CASE("loss and adapter gradients on a GPU equal those of a plain dense model in double precision", "[nn][cuda]") {
  if (no_gpu()) return;
  const std::vector<int64_t> rows =
      GENERATE(std::vector<int64_t>{0, 9, 10, 24}, std::vector<int64_t>{0, 40, 80}, std::vector<int64_t>{0, 33, 34, 96});
  CausalLM on_cpu = tiny::make_model(at::kFloat), model = tiny::make_model(at::kFloat, 0, kGpu);
  model.arena().values().copy_(on_cpu.arena().values());
  const Batch batch = long_batch(rows, model.config().vocab_size);
  const auto expected = tiny::reference_loss_and_gradients(on_cpu, batch);
  const Keep keep = GENERATE(Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly);
  model.settings().set_segments(keep_in_each_block(model.config().num_hidden_layers, keep));
  model.settings().set_memory(GENERATE(from_range(kSettings)));
  model.arena().zero_grad();
  const LossSum found = model.forward_backward(batch.to(kGpu), at::ones({}, kGpu), {});
  REQUIRE(std::abs(found.loss.item<double>() - expected.loss) < 1e-5 * expected.loss);
  for (int64_t i = 0; i < model.arena().size(); ++i) {
    REQUIRE(tiny::relative_error(model.arena().gradient(i), expected.gradients[static_cast<size_t>(i)]) < 3e-5);
  }
}

TEST_CASE("a micro-step on a GPU waits for nothing, and takes no memory that the first did not", "[nn][cuda]") {
  if (no_gpu()) return;
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16);
  const Keep keep = GENERATE(Keep::kEverything, Keep::kInputOnly, Keep::kInputOnHost);
  CausalLM model = tiny::make_model(dtype, 0, kGpu);
  model.settings().set_segments(keep_in_each_block(model.config().num_hidden_layers, keep));
  model.settings().set_memory(GENERATE(from_range(kSettings)));
  const Batch batch = long_batch({0, 64, 128}, model.config().vocab_size).to(kGpu);
  const at::Tensor scale = at::ones({}, kGpu);
  model.arena().zero_grad();
  model.forward_backward(batch, scale, {});
  const auto reserved = [] {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device()).reserved_bytes[0].current;
  };
  const auto before = reserved();
  for (uint32_t step = 1; step < 5; ++step) {
    const NothingWaits guard;
    model.forward_backward(batch, scale, {0, step});
  }
  REQUIRE(reserved() == before);
}

TEST_CASE("deterministic gradients have the same bits in every run, at lengths where attention works in many blocks",
          "[nn][cuda]") {
  if (no_gpu()) return;
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16);
  const std::vector<int64_t> rows =
      GENERATE(std::vector<int64_t>{0, 1024}, std::vector<int64_t>{0, 512, 1024}, std::vector<int64_t>{0, 700, 1024});
  CausalLM model = tiny::make_model(dtype, 0, kGpu);
  model.settings().set_deterministic(true);
  const Batch batch = long_batch(rows, model.config().vocab_size).to(kGpu);
  const at::Tensor scale = at::ones({}, kGpu);
  at::Tensor loss, gradients;
  for (int run = 0; run < 4; ++run) {
    model.arena().zero_grad();
    const at::Tensor found = model.forward_backward(batch, scale, {}).loss.clone();
    if (run > 0) {
      REQUIRE(at::equal(found, loss));
      REQUIRE(at::equal(model.arena().gradients(), gradients));
    }
    loss = found;
    gradients = model.arena().gradients().clone();
  }
}

TEST_CASE("a micro-step in fp16 meets no bf16 tensor: sm_75 has none", "[nn][cuda]") {
  if (no_gpu()) return;
  const at::ScalarType dtype = GENERATE(at::kHalf, at::kBFloat16);  // of bf16 it must find some, or it sees nothing
  const Keep keep = GENERATE(Keep::kEverything, Keep::kInputOnly);
  CausalLM model = tiny::make_model(dtype, 0, kGpu);
  model.settings().set_segments(keep_in_each_block(model.config().num_hidden_layers, keep));
  const Batch batch = long_batch({0, 64, 128}, model.config().vocab_size).to(kGpu);
  const at::Tensor scale = at::ones({}, kGpu);
  static std::atomic<int> calls, with_bf16;
  calls = with_bf16 = 0;
  static const auto look = [](c10::ArrayRef<const c10::IValue> values) {
    for (const c10::IValue& value : values) {
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kBFloat16) ++with_bf16;
      if (!value.isTensorList()) continue;
      for (const at::Tensor& tensor : value.toTensorVector())
        with_bf16 += tensor.defined() && tensor.scalar_type() == at::kBFloat16;
    }
  };
  const auto begins = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    ++calls;
    look(call.inputs());
    return nullptr;
  };
  const auto ends = [](const at::RecordFunction& call, at::ObserverContext*) {
    look(c10::ArrayRef<const c10::IValue>(call.outputs().data(), call.outputs().size()));
  };
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begins, ends).needsInputs(true).needsOutputs(true));
  model.forward_backward(batch, scale, {});
  at::removeCallback(handle);
  REQUIRE(calls > 50);
  REQUIRE((with_bf16 > 0) == (dtype == at::kBFloat16));
}

TEST_CASE("a micro-step is captured in a CUDA graph, and its replay adds the same gradients", "[nn][cuda]") {
  if (no_gpu()) return;
  const at::ScalarType dtype = GENERATE(at::kHalf, at::kBFloat16);
  CausalLM model = tiny::make_model(dtype, 0, kGpu);
  model.settings().set_segments(
      keep_in_each_block(model.config().num_hidden_layers, GENERATE(Keep::kEverything, Keep::kInputOnly)));
  model.settings().set_memory(GENERATE(from_range(kSettings)));
  const Batch batch = long_batch({0, 64, 128}, model.config().vocab_size).to(kGpu);
  const at::Tensor scale = at::ones({}, kGpu);
  model.arena().zero_grad();
  const at::Tensor expected_loss = model.forward_backward(batch, scale, {}).loss.clone();
  const at::Tensor expected = model.arena().gradients().clone();

  const c10::cuda::CUDAStreamGuard side(c10::cuda::getStreamFromPool());
  c10::cuda::device_synchronize();
  model.forward_backward(batch, scale, {});  // library handles of this stream
  c10::cuda::device_synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const at::Tensor loss = model.forward_backward(batch, scale, {}).loss;
  graph.capture_end();
  for (int replay = 0; replay < 2; ++replay) {
    model.arena().zero_grad();
    graph.replay();
    c10::cuda::device_synchronize();
    REQUIRE(at::equal(loss, expected_loss));
    REQUIRE(at::equal(model.arena().gradients(), expected));
  }
}
