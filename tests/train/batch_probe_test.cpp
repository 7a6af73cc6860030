// SPDX-License-Identifier: Apache-2.0
// What the probe says that a step took: against the plan, phase by phase, and it leaves nothing behind.
#include "qlorapp/train/batch_probe.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/timeline_svg.hpp"

using namespace qlorapp;

namespace {

std::map<ops::MemoryPhase, int64_t> peaks_of(const std::vector<MeasuredMemory::Moment>& moments) {
  std::map<ops::MemoryPhase, int64_t> peaks;
  for (const auto& moment : moments) peaks[moment.phase] = std::max(peaks[moment.phase], moment.in_use.count);
  return peaks;
}

}  // namespace

TEST_CASE("each phase of a step that was taken is as full as planned", "[train][cpu]") {
  const Keep keep = GENERATE(Keep::kEverything, Keep::kInputOnly);
  const int64_t accumulation = GENERATE(1, 3);
  CausalLM model = tiny::make_model(at::kFloat);
  model.settings().set_segments(keep_in_each_block(4, keep));
  PlanSettings settings = settings_of(model);
  settings.batch = 4;
  settings.length = 64;
  settings.accumulation = accumulation;
  settings.eval_batch = 2;
  const MemoryPlan plan = plan_memory(settings);
  const Probe probe = probe_step(model, {4, 64, accumulation, 2, settings.optimizer_is_8bit, /*records=*/true});
  std::map<ops::MemoryPhase, int64_t> peaks = peaks_of(probe.moments);
  int64_t most = 0;
  for (const auto phase : {ops::MemoryPhase::kForward, ops::MemoryPhase::kLoss, ops::MemoryPhase::kBackward,
                           ops::MemoryPhase::kOptimizer, ops::MemoryPhase::kEvaluation}) {
    const auto planned = static_cast<double>(plan.of(phase).allocated.count), measured = static_cast<double>(peaks[phase]);
    INFO(ops::to_string(phase) << ": planned " << planned << ", measured " << measured);
    CHECK(planned <= 1.05 * measured);
    CHECK(planned >= 0.97 * measured);
    most = std::max(most, peaks[phase]);
  }
  CHECK(probe.peak.count == most);
  Bytes drawn;
  for (const MeasuredPoint& point : measured_curve(plan, probe.moments)) drawn = std::max(drawn, point.most);
  CHECK(drawn == probe.peak);  // the picture shows the whole of it
}

TEST_CASE("a probe counts from what is there, and leaves nothing behind", "[train][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const at::Tensor values = model.arena().values().clone();
  static_cast<void>(probe_step(model, {2, 32, 1, 0, false, false}));  // the model's rotary tables are made once, and stay
  const Probe probe = probe_step(model, {2, 32, 1, 0, false, false});
  CHECK(probe.moments.empty());
  CHECK(probe.peak - probe.taken == resident_bytes(model));
  CHECK(probe.taken.count > 0);
  CHECK(probe_step(model, {2, 32, 1, 0, false, false}).peak.count == probe.peak.count);
  CHECK(at::equal(values, model.arena().values()));
  CHECK(model.arena().gradients().abs().sum().item<double>() == 0);
  CHECK_THROWS_AS(probe_step(model, {0, 32, 1, 0, false, false}), ValueError);
  CHECK_THROWS_AS(probe_step(model, {1, 1, 1, 0, false, false}), ValueError);
}
