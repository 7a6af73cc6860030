// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <string>

#include "catch.hpp"
#include "core/check.hpp"
#include "environment.hpp"
#include "format/expect_error.hpp"
#include "memory/plan_settings.hpp"
#include "nn/block/decoder_block.hpp"
#include "qlorapp/adapters/parameter_count.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/memory/roofline.hpp"
#include "qlorapp/memory/timeline_svg.hpp"

using namespace qlorapp;
using Catch::Matchers::WithinRel;
using ops::MemoryPhase;
using ops::MemoryUse;

namespace {

Bytes part(const MemoryPlan& plan, MemoryPhase phase, MemoryUse use) { return plan.of(phase).parts[static_cast<size_t>(use)]; }

}  // namespace

TEST_CASE("what never changes is what the shapes say") {
  const PlanSettings settings = settings_for("llama-3.2-1b");
  const MemoryPlan plan = plan_memory(settings);
  int64_t linear = 0;
  for (const auto& layer : format::parameters(settings.model, format::Role::kLinear)) linear += layer.shape[0] * layer.shape[1];
  const auto backward = [&](MemoryUse use) { return part(plan, MemoryPhase::kBackward, use).count; };
  CHECK(backward(MemoryUse::kCodes) == linear / 2);
  // A byte in 64 elements, four in 16,384, and a mean of four a layer.
  CHECK(backward(MemoryUse::kScales) == linear / 64 + linear / 64 / 256 * 4 + 4 * 7 * 16);
  CHECK(backward(MemoryUse::kDense) == 2 * (format::parameter_count(settings.model) - linear));
  CHECK(plan.trainable_parameters == count_parameters(settings.model, settings.lora).trainable);
  CHECK(backward(MemoryUse::kAdapters) == 4 * plan.trainable_parameters);  // every size is a multiple of 256 here
  CHECK(backward(MemoryUse::kGradients) == 4 * plan.trainable_parameters);
  CHECK(backward(MemoryUse::kOptimizer) == 2 * plan.trainable_parameters + 8 * plan.trainable_parameters / 256);
}

TEST_CASE("what is kept is what a block keeps on its own, for every policy, and low-rank products") {
  for (const Keep keep : {Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly}) {
    const PlanSettings settings = settings_for("llama-3.2-1b", keep);
    const MemoryPlan plan = plan_memory(settings);
    Bytes kept = DecoderBlock::kept_bytes(settings.model, 2048, keep, at::kBFloat16, /*stacked=*/true) * 16;
    // Of rank 16 the products with seven A, o's padded to 64, and as many columns behind gate|up.
    if (keep == Keep::kEverything) kept += Bytes{2048 * (7 * 16 + 48 + 64) * 2 * 16};
    kept += Bytes{2048 * 2048 * 2};  // and what the last norm reads
    CHECK(part(plan, MemoryPhase::kLoss, MemoryUse::kKept) >= kept);
    // The products u of a stack are one tensor with room for its padding.
    CHECK(part(plan, MemoryPhase::kLoss, MemoryUse::kKept).count * 50 <= kept.count * 51);
  }
}

TEST_CASE("the workspace of cuBLAS is what PyTorch will give it") {
  const auto workspace = [](const char* gpu) {
    return part(plan_memory(settings_for("llama-3.2-1b", gpu)), MemoryPhase::kBackward, MemoryUse::kLibrary).count;
  };
  {
    const Variable none("CUBLAS_WORKSPACE_CONFIG", nullptr);
    CHECK(workspace("H200") == 32 << 20);
    CHECK(workspace("T4") == 8320 << 10);
  }
  const Variable deterministic("CUBLAS_WORKSPACE_CONFIG", ":16:8");
  CHECK(workspace("H200") == 128 << 10);
  const Variable two("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8");
  CHECK(workspace("T4") == 8320 << 10);
  CHECK(workspace("H200") == 8320 << 10);
  const Variable malformed("CUBLAS_WORKSPACE_CONFIG", "4 MiB");  // PyTorch warns and goes on
  CHECK(workspace("H200") == 32 << 20);
}

TEST_CASE("inputs on the host are there and not on the device") {
  const MemoryPlan on_device = plan_memory(settings_for("llama-3.2-1b", Keep::kInputOnly));
  const MemoryPlan on_host = plan_memory(settings_for("llama-3.2-1b", Keep::kInputOnHost));
  CHECK(on_device.pinned_host == Bytes{});
  CHECK(on_host.pinned_host == Bytes{15 * 2048 * 2048 * 2});  // the last block keeps its own
  CHECK(on_host.of(MemoryPhase::kLoss).tensors + Bytes{14 * 2048 * 2048 * 2} <= on_device.of(MemoryPhase::kLoss).tensors);
}

TEST_CASE("each setting saves what it says") {
  const int64_t x = 2048 * 4096 * 2;
  PlanSettings settings = settings_for("llama-3.1-8b");
  const auto plan = [&](const char* keep, const MemorySettings& memory) {
    settings.segments = parse_segments(keep, 32);
    settings.memory = memory;
    return plan_memory(settings);
  };
  const auto tensors = [](const MemoryPlan& found, MemoryPhase phase) { return found.of(phase).tensors; };
  const auto peak = [](const MemoryPlan& found) { return found.of(found.fullest_of_training()).tensors; };
  // Backward frees the end of the model first.
  CHECK(peak(plan("input_only,everything:12", {})) < peak(plan("everything:12,input_only", {})));
  const MemoryPlan host = plan("input_on_host", {});
  const MemoryPlan chunk = plan("input_on_host", {.loss_chunk_rows = 512});
  CHECK(tensors(host, MemoryPhase::kLoss) - tensors(chunk, MemoryPhase::kLoss) == Bytes{int64_t{2047 - 512} * (128256 + 4096) * 2});
  const MemoryPlan embedding = plan("input_on_host", {.embedding_on_host = true});
  CHECK(peak(host) - peak(embedding) == Bytes{128256 * int64_t{4096} * 2});
  CHECK(host.pinned_host == Bytes{31 * x});
  CHECK(embedding.pinned_host - host.pinned_host == Bytes{128256 * int64_t{4096} * 2});
  const MemoryPlan stack = plan("input_on_host", {.weight_workspace = WeightWorkspace::kStack});
  const MemoryPlan projection = plan("input_on_host", {.weight_workspace = WeightWorkspace::kProjection});
  const MemoryPlan tiles = plan("input_on_host", {.mlp_tile_rows = 512, .weight_workspace = WeightWorkspace::kStack});
  CHECK(tensors(stack, MemoryPhase::kBackward) < tensors(host, MemoryPhase::kBackward));
  CHECK(tensors(projection, MemoryPhase::kBackward) < tensors(stack, MemoryPhase::kBackward));
  CHECK(tensors(tiles, MemoryPhase::kBackward) < tensors(stack, MemoryPhase::kBackward));
}

TEST_CASE("a base on the host needs two of its blocks on the GPU, and says when the bus is the limit") {
  PlanSettings settings = settings_for("llama-3.1-70b", Keep::kInputOnly);
  const MemoryPlan resident = plan_memory(settings);
  settings.memory.base_on_host = true;
  const MemoryPlan host = plan_memory(settings);
  const auto base = [](const MemoryPlan& plan) {
    const MemoryParts& parts = plan.of(MemoryPhase::kBackward).parts;
    return parts[static_cast<size_t>(ops::MemoryUse::kCodes)] + parts[static_cast<size_t>(ops::MemoryUse::kScales)];
  };
  // 80 blocks and their alignment to 256 bytes: 28 tensors each.
  CHECK(std::abs(base(host).count * 40 - base(resident).count) <= 80 * 28 * 256);
  CHECK(std::abs((host.pinned_host - base(resident)).count) <= 80 * 28 * 256);
  const Bytes spared = base(resident) - base(host);
  CHECK(resident.of(MemoryPhase::kBackward).tensors - host.of(MemoryPhase::kBackward).tensors == spared);
  CHECK(host.training_peak() < Bytes{int64_t{24} << 30});
  CHECK(resident.training_peak() > Bytes{int64_t{35} << 30});
  CHECK(host.of(MemoryPhase::kLoad).tensors * 5 < resident.of(MemoryPhase::kLoad).tensors);

  const Gpu t4 = find_gpu("T4"), h100 = find_gpu("H100");
  settings.compute_dtype = at::kHalf;
  const StepTime one_row = step_time(settings, h100, 128), many = step_time(settings, h100, 8192);
  CHECK(one_row.copies > one_row.computation());
  CHECK_THAT(one_row.micro_batch(), WithinRel(one_row.copies, 1e-9));
  CHECK(many.waits() == 0);
  CHECK(step_time(settings, t4, 128).copies > 2 * one_row.copies);
  settings.length = 128;
  CHECK(bus_text(settings, h100).find("The bus is the limit") != std::string::npos);
  settings.length = 8192;
  CHECK(bus_text(settings, h100).find("cost nothing") != std::string::npos);
  settings.memory.base_on_host = false;
  CHECK(bus_text(settings, h100).empty());
}

TEST_CASE("the smallest settings leave room below the low-memory goals") {
  const auto step = [](const char* model, int64_t length) {
    PlanSettings settings = settings_for(model, Keep::kInputOnHost);
    settings.length = length;
    settings.memory = {512, 1024, WeightWorkspace::kStack, true};
    const MemoryPlan plan = plan_memory(settings);
    return plan.training_peak().count;
  };
  CHECK(step("llama-3.1-8b", 2048) < 5'600'000'000);
  CHECK(step("llama-3.2-1b", 2048) < 1'400'000'000);
  CHECK(step("llama-3.1-70b", 2048) < 41'000'000'000);
  CHECK(step("llama-3.1-8b", 16384) - step("llama-3.1-8b", 2048) < 100'000 * (16384 - 2048));
}

TEST_CASE("more of anything is never less memory") {
  PlanSettings settings = settings_for("llama-3.2-1b", Keep::kInputOnly);
  const Bytes peak = plan_memory(settings).peak_allocated();
  const auto with = [&](auto change) {
    PlanSettings more = settings;
    change(more);
    return plan_memory(more).peak_allocated();
  };
  CHECK(with([](PlanSettings& s) { s.batch = 2; }) > peak);
  CHECK(with([](PlanSettings& s) { s.length = 4096; }) > peak);
  CHECK(with([](PlanSettings& s) { s.lora.r = 64; }) > peak);
  CHECK(with([](PlanSettings& s) { s.optimizer_is_8bit = false; }) > peak);
  CHECK(with([](PlanSettings& s) { s.segments.clear(); }) > peak);
  CHECK(with([](PlanSettings& s) { s.load_in_4bit = false; }) > peak);
  CHECK(with([](PlanSettings& s) { s.accumulation = 64; }).count - peak.count == 63 * 3 * 2048 * 8);
}

TEST_CASE("a longer batch of as many tokens takes nearly the same memory") {
  PlanSettings settings = settings_for("llama-3.2-1b", Keep::kInputOnly);
  settings.batch = 8;
  settings.length = 512;
  const auto rows = static_cast<double>(plan_memory(settings).peak_allocated().count);
  settings.batch = 1;
  settings.length = 4096;
  CHECK_THAT(static_cast<double>(plan_memory(settings).peak_allocated().count), WithinRel(rows, 0.01));
}

TEST_CASE("the largest batch fits, and one row more does not") {
  PlanSettings settings = settings_for("llama-3.2-1b", Keep::kInputOnly);
  const Bytes room{int64_t{4} << 30};
  const int64_t batch = largest_batch(settings, room, 512);
  REQUIRE(batch > 1);
  settings.batch = batch;
  CHECK(plan_memory(settings).peak_reserved() <= room);
  settings.batch = batch + 1;
  CHECK(plan_memory(settings).peak_reserved() > room);
  CHECK(largest_batch(settings, room, batch / 2) == batch / 2);
  CHECK(largest_batch(settings, Bytes{1 << 20}, 8) == 0);
  CHECK_THROWS_AS(largest_batch(settings, Bytes{-1}, 8), ValueError);
  CHECK_THROWS_AS(largest_batch(settings, room, 0), ValueError);
}

TEST_CASE("sizes that are no sizes are refused by name") {
  const auto message = [](auto change) {
    PlanSettings settings = settings_for("llama-3.2-1b", Keep::kEverything);
    change(settings);
    return thrown<ValueError>([&] { static_cast<void>(plan_memory(settings)); });
  };
  CHECK(has(message([](PlanSettings& s) { s.batch = 0; }), "batch must be at least 1; got 0"));
  CHECK(has(message([](PlanSettings& s) { s.batch = -4; }), "batch"));
  CHECK(has(message([](PlanSettings& s) { s.length = 1; }), "length"));
  CHECK(has(message([](PlanSettings& s) { s.accumulation = 0; }), "accumulation"));
  CHECK(has(message([](PlanSettings& s) { s.eval_batch = -1; }), "eval_batch"));
  CHECK(has(message([](PlanSettings& s) { s.batch = std::numeric_limits<int64_t>::max(); }), "64 bits"));
  CHECK(has(message([](PlanSettings& s) { s.length = int64_t{1} << 50; }), "64 bits"));
  CHECK(has(message([](PlanSettings& s) { s.lora.r = 0; }), "r must"));
  CHECK(has(message([](PlanSettings& s) { s.lora.target_modules = NamesOrPattern("nothing_proj"); }), "target_modules"));
  CHECK(has(message([](PlanSettings& s) { s.segments.pop_back(); }), "segments"));
  CHECK(has(message([](PlanSettings& s) { s.quantization.block_size = 48; }), "block_size"));
  // And the thread can plan again.
  CHECK(plan_memory(settings_for("llama-3.2-1b")).peak_allocated().count > 0);
}

TEST_CASE("a step takes as long as its parts, and more cards' rates make it shorter") {
  PlanSettings settings = settings_for("llama-3-8b");
  const StepTime fast = step_time(settings, find_gpu("H200"), 2048), slow = step_time(settings, find_gpu("T4"), 2048);
  CHECK_THAT(fast.micro_batch(), WithinRel(fast.products + fast.attention + fast.memory, 1e-9));
  CHECK(slow.micro_batch() > 10 * fast.micro_batch());
  settings.segments = keep_in_each_block(32, Keep::kInputOnly);
  CHECK(step_time(settings, find_gpu("H200"), 2048).micro_batch() > 1.2 * fast.micro_batch());
  settings.segments = keep_in_each_block(32, Keep::kAttentionOnly);
  CHECK_THAT(step_time(settings, find_gpu("H200"), 2048).attention, WithinRel(fast.attention, 1e-9));
  CHECK_THROWS_AS(step_time(settings, find_gpu("16GiB"), 2048), ValueError);
  // docs/performance.md, tokens a second measured on an H200; the estimate claims 15 %.
  struct Row {
    const char* model;
    int64_t batch;
    Keep keep;
    double measured;
    bool float8 = false;
  };
  for (const Row& row : {Row{"llama-3-8b", 1, Keep::kEverything, 15911}, Row{"llama-3-8b", 2, Keep::kEverything, 16853},
                         Row{"llama-3-8b", 4, Keep::kEverything, 17397}, Row{"llama-3-8b", 2, Keep::kInputOnly, 12855},
                         Row{"llama-3.2-1b", 2, Keep::kEverything, 85901}, Row{"llama-3.2-1b", 2, Keep::kInputOnHost, 68462},
                         Row{"llama-3.2-1b", 8, Keep::kInputOnHost, 72506}, Row{"llama-3-8b", 1, Keep::kEverything, 20120, true},
                         Row{"llama-3-8b", 2, Keep::kEverything, 21982, true}, Row{"llama-3-8b", 2, Keep::kInputOnly, 16902, true},
                         Row{"llama-3.2-1b", 2, Keep::kEverything, 97579, true}}) {
    PlanSettings own = settings_for(row.model, row.keep);
    own.batch = row.batch;
    own.float8 = row.float8;
    const StepTime time = step_time(own, find_gpu("H200"), 2048);
    const double rate = static_cast<double>(row.batch * 2048) / (time.micro_batch() + time.optimizer);
    INFO(row.model << " " << row.batch << " " << to_string(row.keep) << ": " << rate << " for " << row.measured);
    CHECK_THAT(rate, WithinRel(static_cast<double>(row.measured), 0.15));
  }
  // float32 has no tensor cores, and is nobody's measurement.
  PlanSettings wide = settings_for("llama-3-8b");
  wide.compute_dtype = at::kFloat;
  const StepTime slowest = step_time(wide, find_gpu("H200"), 2048);
  CHECK(slowest.micro_batch() > 8 * fast.micro_batch());
  CHECK(slowest.evidence == Evidence::kExtrapolated);
  CHECK_THROWS_AS(step_time(wide, find_gpu("16GiB", 90, 3e12, 9e14), 2048), ValueError);
}

TEST_CASE("the picture is one SVG with every part and phase in it") {
  PlanSettings settings = settings_for("llama-3.2-1b", Keep::kInputOnly);
  settings.eval_batch = 1;
  const MemoryPlan plan = plan_memory(settings);
  const std::vector<MeasuredMemory::Moment> measured{{MemoryPhase::kLoad, Bytes{int64_t{9} << 30}},
                                                     {MemoryPhase::kForward, Bytes{int64_t{1} << 30}},
                                                     {MemoryPhase::kBackward, Bytes{int64_t{3} << 30}},
                                                     {MemoryPhase::kBackward, Bytes{int64_t{2} << 30}}};
  const std::string svg = timeline_svg(plan, "a <b> & c", Bytes{int64_t{4} << 30}, measured);
  for (const char* wanted : {"<svg ", "</svg>", "a &lt;b&gt; &amp; c", "forward", "backward", "evaluation", "4-bit codes", "logits",
                             "limit 4.00 GiB<", "GiB allocated", "measured, 3.0 GiB at most"}) {
    INFO(wanted);
    CHECK(has(svg, wanted));
  }
  CHECK(has(timeline_svg(plan, "", Bytes{int64_t{400} << 30}), "limit 400 GiB, above this picture"));
  CHECK(timeline_title("a", settings, "T4") == message("a, {} x {} tokens in bfloat16, on T4", settings.batch, settings.length));
  CHECK_FALSE(has(svg, "<script"));
  CHECK_FALSE(has(svg, "nan"));
  Bytes most;
  for (const TimelinePoint& point : plan.timeline) most = std::max(most, sum(point.parts));
  CHECK(most == plan.of(plan.fullest_of_training()).tensors);
}

TEST_CASE("weights that are multiplied in eight bits take half the workspace") {
  PlanSettings settings = settings_for("llama-3-8b");
  const MemoryPlan plain = plan_memory(settings);
  settings.float8 = true;
  const MemoryPlan eight = plan_memory(settings);
  const auto workspace = [](const MemoryPlan& plan) {
    return static_cast<double>(part(plan, MemoryPhase::kForward, MemoryUse::kDequantized).count);
  };
  CHECK(workspace(eight) > 0);
  CHECK(workspace(eight) < 0.6 * workspace(plain));
  CHECK(eight.of(MemoryPhase::kOptimizer).tensors.count > 0);
}

TEST_CASE("a measured curve is laid over the phases of the plan, and no peak is lost") {
  PlanSettings settings = settings_for("llama-3.2-1b", Keep::kInputOnly);
  const MemoryPlan plan = plan_memory(settings);
  const auto first_of = [&](MemoryPhase phase) {
    size_t i = 0;
    while (plan.timeline[i].phase != phase) ++i;
    return static_cast<double>(i);
  };
  std::vector<MeasuredMemory::Moment> moments{{MemoryPhase::kLoad, Bytes{1 << 30}}};
  for (int i = 0; i < 5000; ++i) moments.push_back({MemoryPhase::kForward, Bytes{i}});
  for (int i = 0; i < 3; ++i) moments.push_back({MemoryPhase::kBackward, Bytes{7000 + i}});
  moments[777].in_use = Bytes{6000};
  const std::vector<MeasuredPoint> curve = measured_curve(plan, moments);
  Bytes forward, backward;
  for (size_t i = 0; i < curve.size(); ++i) {
    CHECK((i == 0 || curve[i].at > curve[i - 1].at));
    (curve[i].at < first_of(MemoryPhase::kLoss) ? forward : backward) =
        std::max(curve[i].at < first_of(MemoryPhase::kLoss) ? forward : backward, curve[i].most);
    if (curve[i].most >= Bytes{7000}) CHECK(curve[i].at > first_of(MemoryPhase::kBackward));
  }
  CHECK(forward == Bytes{6000});
  CHECK(backward == Bytes{7002});
  CHECK(curve.size() <= plan.timeline.size());
  CHECK(measured_curve(plan, {}).empty());
}

TEST_CASE("gradients of the same bits in every run cost attention more memory, by the card's multiprocessors") {
  PlanSettings settings = settings_for("llama-3.1-8b", "A100-80GB");  // flash attention, with or without
  const auto attention = [&] {
    Bytes most;
    for (const TimelinePoint& point : plan_memory(settings).timeline)
      if (point.phase == MemoryPhase::kBackward) most = std::max(most, point.parts[static_cast<size_t>(MemoryUse::kAttention)]);
    return most;
  };
  const Bytes plain = attention();
  settings.deterministic = true;
  // 108 multiprocessors over 32 heads: four sums of dQ for one, (2,048, 32, 128) float32 each.
  CHECK(attention() - plain == Bytes{3 * int64_t{2048} * 32 * 128 * 4});
  settings.batch = 4;
  settings.length = 512;  // 128 blocks: every multiprocessor has its own anyway
  const Bytes rows = attention();
  settings.deterministic = false;
  CHECK(attention() == rows);
}

TEST_CASE("paged moments are on the card while there is room, and then on the host") {
  PlanSettings settings = settings_for("llama-3.2-1b", Keep::kInputOnly);
  settings.optimizer_is_8bit = false;
  settings.lora.r = 64;
  const MemoryPlan roomy = plan_memory(settings);
  const Bytes moments = part(roomy, MemoryPhase::kBackward, MemoryUse::kOptimizer);
  const Bytes room = roomy.peak_reserved() - Bytes{moments.count / 2};
  CHECK_FALSE(plan_memory(settings, room).fits);
  settings.optimizer_is_paged = true;
  CHECK(plan_memory(settings, roomy.peak_reserved()).fits);
  const Bytes enough =
      roomy.peak_reserved() + Bytes{64 << 20} + Bytes{roomy.peak_reserved().count / 90};  // what replays do not see
  CHECK_FALSE(plan_memory(settings, enough).optimizer_on_host);
  const MemoryPlan tight = plan_memory(settings, room);
  CHECK(tight.fits);
  CHECK(tight.optimizer_on_host);
  CHECK(tight.pinned_host == moments);
  CHECK(part(tight, MemoryPhase::kBackward, MemoryUse::kOptimizer) == Bytes{});
  CHECK(has(checklist(tight, settings), "in host memory"));
  const MemoryPlan never = plan_memory_in(settings, Bytes{1 << 20});
  CHECK_FALSE(never.fits);
  CHECK(never.training_peak() == roomy.training_peak());
}

TEST_CASE("expandable segments hold little more than a step has in use, where fixed ones need a tenth more") {
  // Batches that ran out of memory under these caps with fixed segments.
  PlanSettings settings = settings_for("llama-3-8b", Keep::kInputOnly);
  settings.batch = 16;
  const MemoryPlan expandable = plan_memory(settings);
  settings.device.expandable_segments = false;
  const MemoryPlan fixed = plan_memory(settings);
  CHECK(expandable.training_peak() <= fixed.training_peak());
  CHECK(expandable.peak_reserved() < fixed.peak_reserved());
  for (const double part : {1.0, 0.9, 0.8}) {
    PlanSettings asked = settings_for("llama-3-8b", Keep::kInputOnly);
    const Bytes room{static_cast<int64_t>(part * 24 * 0x1p30)};
    asked.batch = largest_batch(asked, room, 64);
    const MemoryPlan plan = plan_memory(asked, room);
    REQUIRE(plan.fits);
    CHECK(plan.peak_reserved() <= room);
    // Where the room is not short, holes of the widest tensors may stay.
    const int64_t percent = part == 1.0 ? 2 : 3;
    CHECK(plan.peak_reserved().count <= plan.peak_allocated().count * (100 + percent) / 100 + (64 << 20));
    asked.batch += 1;
    CHECK_FALSE(plan_memory(asked, room).fits);
  }
}
