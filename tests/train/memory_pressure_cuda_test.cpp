// SPDX-License-Identifier: Apache-2.0
#include "ops/device_memory.hpp"
#include "train/paged_state.hpp"

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cmath>
#include <optional>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/optimizer.hpp"
#include "qlorapp/train/trainer.hpp"

using namespace qlorapp;
namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

/// Caps what this process may take at what it has and `more`, and lifts the cap at its end.
struct Cap {
  explicit Cap(int64_t more) {
    allocator::emptyCache();
    const int64_t reserved = allocator::getDeviceStats(0).reserved_bytes[0].current;
    allocator::setMemoryFraction(
        static_cast<double>(reserved + more) / static_cast<double>(ops::device_room({at::kCUDA, 0})->total.count), 0);
  }
  ~Cap() { allocator::setMemoryFraction(1.0, 0); }
};

at::Tensor megabytes(int64_t count) { return at::empty({count << 20}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA)); }

/// All that a capped process may still have, holes between what it holds included.
std::vector<at::Tensor> take_all() {
  std::vector<at::Tensor> taken;
  for (int64_t bytes = int64_t{64} << 20; bytes >= 512;) {
    try {
      taken.push_back(at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA)));
    } catch (const c10::OutOfMemoryError&) { bytes /= 2; }
  }
  return taken;
}

}  // namespace

TEST_CASE("room is the device's free memory, or less by the cap of the process", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  REQUIRE_FALSE(ops::device_room(at::kCPU).has_value());
  const auto open = *ops::device_room({at::kCUDA, 0});
  const Cap cap(int64_t{100} << 20);
  const auto capped = *ops::device_room({at::kCUDA, 0});
  REQUIRE(capped.free.count <= int64_t{100} << 20);
  REQUIRE(capped.free.count >= int64_t{99} << 20);
  REQUIRE(capped.total < open.total);
}

TEST_CASE("moments give way when the device fills, and come back when there is room", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  AdamW::Options options;
  options.state = GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit);
  const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes{{"a", {4000, 4000}}};
  AdapterArena arena(shapes, device), paged_arena(shapes, device);
  AdamW plain(arena, options);
  options.paged = true;
  AdamW paged(paged_arena, options);
  arena.gradients().copy_(at::randn(arena.gradients().sizes()));
  paged_arena.gradients().copy_(arena.gradients());
  const auto step_both = [&] {
    plain.step(1e-2);
    paged.step(1e-2);
    REQUIRE(at::equal(arena.values(), paged_arena.values()));
  };
  step_both();
  REQUIRE_FALSE(paged.paged_state()->on_host());
  {
    const Cap cap(int64_t{256} << 20);
    const at::Tensor fits = megabytes(20);
    REQUIRE_FALSE(paged.paged_state()->on_host());  // an eighth of the cap is left
    // The first request that is more than what is left without the moments is served all the same, by their place.
    std::vector<at::Tensor> filler;
    for (int64_t taken = 20; !paged.paged_state()->on_host() && taken < 2 * 256; taken += 8) filler.push_back(megabytes(8));
    REQUIRE(paged.paged_state()->on_host());
  }
  {
    const Cap cap(int64_t{96} << 20);  // room for a chunk, not for the moments
    step_both();
    REQUIRE(paged.paged_state()->on_host());
    step_both();
  }
  {  // not even a chunk fits: the update fails before it has changed anything
    paged.paged_state()->move_to_host();
    const at::Tensor before = paged_arena.values().clone();
    std::vector<at::Tensor> copies;
    for (const auto& [name, moment] : paged.state_tensors()) copies.push_back(moment.clone());
    {
      const Cap cap(0);
      const std::vector<at::Tensor> rest = take_all();
      CHECK_THROWS_AS(paged.step(1e-2), c10::OutOfMemoryError);
    }
    CHECK(at::equal(paged_arena.values(), before));
    const auto after = paged.state_tensors();
    for (size_t i = 0; i < after.size(); ++i) CHECK(at::equal(after[i].second, copies[i]));
  }
  step_both();
  REQUIRE_FALSE(paged.paged_state()->on_host());
}

TEST_CASE("pressure from another thread finds moments in use, idle, or gone, and breaks nothing", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes{{"a", {3000, 3000}}};
  AdapterArena arena(shapes, device), paged_arena(shapes, device);
  AdamW::Options options;
  options.state = AdamW::State::kEightBit;
  AdamW plain(arena, options);
  options.paged = true;
  std::optional<AdamW> paged;
  paged.emplace(paged_arena, options);
  const Cap cap(int64_t{400} << 20);
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      const at::Tensor a = megabytes(200), b = megabytes(150), c = megabytes(10);
      allocator::emptyCache();
    }
  });
  for (int i = 0; i < 30; ++i) {
    arena.gradients().fill_(0.01 * (i % 7) - 0.02);
    paged_arena.gradients().copy_(arena.gradients());
    plain.step(1e-2);
    paged->step(1e-2);
  }
  paged.reset();
  stop = true;
  other.join();
  REQUIRE(at::equal(arena.values(), paged_arena.values()));
}

namespace {

struct Trained {
  std::vector<double> losses;
  int64_t reserved = 0, held = 0;  ///< Bytes: at most, and at the last step's end.
};

/// Three steps of two micro-batches of four rows in float32. Without a cap, or with so many bytes beside what is there at the begin.
Trained train_capped(std::optional<int64_t> more, bool worst_case_first) {
  const at::Device device(at::kCUDA, 0);
  const int64_t before = allocator::getDeviceStats(0).allocated_bytes[0].current;
  CausalLM model = tiny::make_model(at::kFloat, /*dropout=*/0.1, device, 4, {512, 1408, 8, 2, 64, 1e-5});
  model.settings().set_deterministic(true);
  std::vector<Example> rows(24);
  at::manual_seed(11);
  for (size_t i = 0; i < rows.size(); ++i) {
    const at::Tensor ids = at::randint(model.config().vocab_size, {static_cast<int64_t>(200 + (i * 97) % 312)}, at::kInt);
    rows[i].input_ids.assign(ids.const_data_ptr<int32_t>(), ids.const_data_ptr<int32_t>() + ids.numel());
    rows[i].labels = rows[i].input_ids;
  }
  TrainingArguments args;
  args.per_device_train_batch_size = 4;
  args.gradient_accumulation_steps = 2;
  args.max_steps = 3;
  args.learning_rate = 1e-4;
  args.logging_steps = 1;
  args.save_strategy = "no";
  args.full_determinism = true;
  args.worst_case_first = worst_case_first;
  Trained result;
  TrainerCallbacks callbacks;
  callbacks.on_event = [&](TrainerEvent event, const TrainState&, TrainerControl&) {
    if (event == TrainerEvent::kStepEnd) result.held = allocator::getDeviceStats(0).allocated_bytes[0].current - before;
  };
  callbacks.on_log = [&](const LogRecord& record, TrainerControl&) {
    if (record.contains("loss")) result.losses.push_back(record.number("loss"));
  };
  Trainer trainer(model, args, std::move(rows), {}, "tiny", callbacks);
  std::optional<Cap> cap;
  if (more) cap.emplace(*more);
  allocator::emptyCache();
  const int64_t begin = allocator::getDeviceStats(0).reserved_bytes[0].current;
  allocator::resetPeakStats(0);
  trainer.train();
  result.reserved = allocator::getDeviceStats(0).reserved_bytes[0].peak - begin;
  return result;
}

}  // namespace

TEST_CASE("a GPU that is too full for a micro-batch takes it in parts, to the same losses", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const bool worst_case_first = GENERATE(false, true);
  train_capped(std::nullopt, worst_case_first);  // libraries' workspaces are there from now on
  const Trained plain = train_capped(std::nullopt, worst_case_first);
  const Trained capped = train_capped(plain.reserved / 2, worst_case_first);
  INFO("reserved " << plain.reserved << ", and " << capped.reserved << " below the cap");
  CHECK(capped.reserved <= plain.reserved / 2);
  REQUIRE(capped.losses.size() == 3);
  for (size_t i = 0; i < 3; ++i) CHECK(std::abs(capped.losses[i] - plain.losses[i]) <= 1e-6 * plain.losses[i]);
  CHECK(std::abs(capped.held - plain.held) < int64_t{1} << 20);  // nothing of the failed attempts
}
