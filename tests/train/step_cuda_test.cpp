// SPDX-License-Identifier: Apache-2.0
// How often a step on a GPU waits for it.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/step.hpp"

using namespace qlorapp;

namespace {

/// While it lives, torch's warnings of operations that wait for the GPU are counted.
class Waits final : public c10::WarningHandler {
 public:
  Waits() : guard_(this) { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN); }
  ~Waits() override { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("synchroniz") != std::string::npos) ++count;
  }
  int64_t count = 0;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace

TEST_CASE("a step waits for the GPU once under a loss scale, and never without", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const bool scales = GENERATE(false, true);
  const at::Device gpu(at::kCUDA, 0);
  CausalLM model = tiny::make_model(scales ? at::kHalf : at::kBFloat16, 0, gpu);
  AdamW::Options options;
  options.state = GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit);
  options.paged = GENERATE(false, true);
  GradScaler::Options scaling;
  scaling.device = at::kCUDA;
  scaling.enabled = scales;
  TrainState state(model.arena(), options, scaling);
  state.base_learning_rate = 1e-3;
  state.max_grad_norm = 1;
  state.schedule.type = ScheduleType::kConstant;
  const at::Tensor ids = at::arange(3 * 40, at::TensorOptions().dtype(at::kLong).device(gpu)).remainder_(model.config().vocab_size);
  const std::vector<Batch> window(2, Batch::of_equal_rows(ids.view({3, 40})));
  for (int i = 0; i < 2; ++i) train_step(model, state, std::span<const Batch>(window));  // libraries set themselves up
  {
    const at::Tensor one = at::ones({}, gpu);
    Waits control;
    static_cast<void>(one.item<double>());
    REQUIRE(control.count == 1);
  }
  Waits waits;
  for (int i = 0; i < 3; ++i) train_step(model, state, std::span<const Batch>(window));
  REQUIRE(waits.count == (scales ? 3 : 0));
}
