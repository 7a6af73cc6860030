// SPDX-License-Identifier: Apache-2.0
// The plan against what torch's allocator really hands out, over real steps of small models on a CPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/model_weights.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/train/step.hpp"

using namespace qlorapp;

namespace {

struct Case {
  Keep keep = Keep::kEverything;
  int64_t every = 1;  // blocks a segment
  int64_t batch = 2, length = 96, rank = 8;
  at::ScalarType dtype = at::kFloat;
  bool eight_bit = false, tied = false, grouped = true;
  double dropout = 0;
  int64_t width =
      256;  // 16 bits want a wider model: where a CPU has instructions for them, oneDNN takes scratch that nobody can plan
  std::vector<std::string> saved = {};  // modules_to_save
};

format::ModelConfig config_of(const Case& c) {
  return format::parse_model_config(
      message(R"({{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","hidden_size":{},)"
              R"("intermediate_size":{},"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":{},"head_dim":32,)"
              R"("vocab_size":2048,"max_position_embeddings":4096,"rms_norm_eps":1e-5,"torch_dtype":"float32",)"
              R"("tie_word_embeddings":{}}})",
              c.width, c.width * 5 / 2, c.grouped ? 2 : 8, c.tied),
      "small");
}

std::vector<Segment> segments_of(const Case& c) {
  return c.every > 1 ? checkpoint_every(4, c.every, c.keep) : keep_in_each_block(4, c.keep);
}

LoraConfig lora_of(const Case& c) {
  LoraConfig lora;
  lora.r = c.rank;
  lora.lora_dropout = c.dropout;
  lora.target_modules = NamesOrPattern("all-linear");
  if (!c.saved.empty()) lora.modules_to_save = c.saved;
  return lora;
}

CausalLM real_model(const Case& c) {
  const Quantizer quantizer;
  const auto random = [](at::IntArrayRef shape) {
    return at::empty(shape, at::TensorOptions().dtype(at::kFloat)).uniform_(-0.1, 0.1);
  };
  return {
      config_of(c),
      make_weights(config_of(c), {[&](const std::string&, const std::vector<int64_t>& shape) { return random(shape).to(c.dtype); },
                                  [&](FrozenWeight& into, const std::string&, int64_t out, int64_t in) {
                                    into = FrozenWeight(quantizer.quantize(random({out, in})));
                                  }})};
}

Batch real_batch(const Case& c) {
  Batch batch;
  batch.tokens = at::randint(2048, {c.batch * c.length}, at::kLong);
  batch.targets = batch.tokens.clone();
  batch.positions = at::arange(c.length, at::kLong).repeat({c.batch});
  for (int64_t row = 0; row <= c.batch; ++row) batch.row_starts.push_back(row * c.length);
  for (int64_t row = 1; row <= c.batch; ++row) batch.targets[row * c.length - 1] = Batch::kIgnoredTarget;
  batch.target_count = c.batch * (c.length - 1);
  return batch;
}

struct Measured {
  int64_t step, evaluation;
};

Measured measure(const Case& c) {
  at::manual_seed(1);
  MeasuredMemory memory;
  CausalLM model = real_model(c);
  Measured result{};
  model.add_adapters(lora_of(c), 1);
  model.settings().set_segments(segments_of(c));
  AdamW::Options optimizer;
  if (c.eight_bit) optimizer.state = AdamW::State::kEightBit;
  TrainState state(model.arena(), optimizer, {.enabled = false});
  state.base_learning_rate = 1e-4;
  state.max_grad_norm = 1.0;
  state.schedule.training_steps = 100;
  {
    const Batch batch = real_batch(c);
    memory.reset_peak();
    for (int step = 0; step < 2; ++step) static_cast<void>(train_step(model, state, std::span(&batch, 1)));
    result.step = memory.peak();
  }
  const Batch batch = real_batch(c);
  memory.reset_peak();
  const at::NoGradGuard no_grad;
  static_cast<void>(model.loss_of(model.hidden_states(batch, false, 0, 0), batch));
  result.evaluation = memory.peak();
  return result;
}

MemoryPlan planned(const Case& c) {
  PlanSettings settings;
  settings.model = config_of(c);
  settings.lora = lora_of(c);
  settings.compute_dtype = c.dtype;
  settings.batch = settings.eval_batch = c.batch;
  settings.length = c.length;
  settings.optimizer_is_8bit = c.eight_bit;
  settings.segments = segments_of(c);
  settings.device.threads = at::get_num_threads();
  return plan_memory(settings);
}

std::string name_of(const Case& c) {
  return message("{}{}, {} x {}, r {}, {}{}{}{}{}{}{}{}", to_string(c.keep),
                 c.every > 1 ? message(" every {}", c.every) : std::string(), c.batch, c.length, c.rank, c10::toString(c.dtype),
                 c.eight_bit ? ", 8-bit" : "", c.tied ? ", tied" : "", c.grouped ? "" : ", ungrouped",
                 c.dropout > 0 ? ", dropout" : "", c.saved.empty() ? "" : ", saving ", c.saved.empty() ? "" : c.saved.front(),
                 c.saved.size() > 1 ? " and more" : "");
}

}  // namespace

TEST_CASE("the plan is within 5 % of the measured peak, and never under by more than 3 %") {
  std::vector<Case> cases;
  for (const Keep keep : {Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly, Keep::kInputOnHost})
    cases.push_back({.keep = keep});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Keep keep : {Keep::kEverything, Keep::kInputOnly}) {
      if (dtype == at::kHalf && keep == Keep::kEverything) continue;  // slow on most CPUs
      cases.push_back({.keep = keep, .batch = 1, .length = 256, .dtype = dtype, .width = dtype == at::kFloat ? 256 : 1024});
    }
  }
  cases.push_back({.batch = 8, .length = 64});
  cases.push_back({.keep = Keep::kInputOnly, .batch = 8, .length = 64, .dtype = at::kBFloat16, .width = 1024});
  cases.push_back({.keep = Keep::kAttentionOnly, .batch = 1, .length = 1024});
  cases.push_back({.batch = 1, .length = 16});
  cases.push_back({.rank = 64});
  cases.push_back({.rank = 64, .eight_bit = true});
  cases.push_back({.keep = Keep::kInputOnly, .eight_bit = true, .tied = true});
  cases.push_back({.keep = Keep::kInputOnly, .every = 2});
  cases.push_back({.keep = Keep::kInputOnly, .every = 3, .batch = 1, .length = 512});
  cases.push_back({.grouped = false});
  cases.push_back({.batch = 4, .dropout = 0.1});
  for (const bool tied : {false, true}) {
    cases.push_back({.tied = tied, .saved = {"lm_head"}});
    cases.push_back({.tied = tied, .saved = {"embed_tokens"}});
    cases.push_back({.batch = 4, .length = 200, .tied = tied, .saved = {"embed_tokens", "lm_head"}});
  }
  at::set_num_threads(
      2);  // oneDNN's scratch in 16 bits is each thread's, and beside these small models of as many cores it would be much
  for (const Case& c : cases) {
    const Measured measured = measure(c);
    const MemoryPlan plan = planned(c);
    const auto ratio = [&](const char* what, Bytes predicted, int64_t seen) {
      const double value = static_cast<double>(predicted.count) / static_cast<double>(seen);
      // Where a CPU multiplies float16 itself, oneDNN takes scratch of up to 2 MiB a thread, which nobody can plan.
      const double scratch = c.dtype == at::kHalf ? at::get_num_threads() * 0x1p21 : 0;
      INFO(name_of(c) << ", " << what << ": planned " << predicted.count << ", measured " << seen);
      if (c.dtype == at::kFloat)
        CHECK(std::abs(predicted.count - seen) <= 4096);  // scalars and statistics that are there a moment longer
      CHECK(value <= 1.05);
      CHECK(static_cast<double>(predicted.count) + scratch >= 0.97 * static_cast<double>(seen));
    };
    const auto& phase = [&](ops::MemoryPhase which) -> const PhasePlan& { return plan.of(which); };
    Bytes step;
    for (const auto which :
         {ops::MemoryPhase::kForward, ops::MemoryPhase::kLoss, ops::MemoryPhase::kBackward, ops::MemoryPhase::kOptimizer}) {
      step = std::max(step, phase(which).allocated);
    }
    ratio("step", step, measured.step);
    ratio("evaluation", phase(ops::MemoryPhase::kEvaluation).allocated, measured.evaluation);
  }
}

TEST_CASE("a model that exists has the plan of its configs") {
  const Case c{.keep = Keep::kAttentionOnly, .rank = 4};
  CausalLM model = real_model(c);
  CHECK_THROWS_AS(settings_of(model), ValueError);  // no adapters yet
  model.add_adapters(lora_of(c), 1);
  model.settings().set_segments(segments_of(c));
  PlanSettings settings = settings_of(model);
  settings.batch = settings.eval_batch = c.batch;
  settings.length = c.length;
  CHECK(plan_memory(settings).peak_allocated() == planned(c).peak_allocated());
}
