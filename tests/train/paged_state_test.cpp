// SPDX-License-Identifier: Apache-2.0
#include "train/paged_state.hpp"

#include <ATen/ATen.h>

#include <cstdlib>
#include <filesystem>

#include "catch.hpp"
#include "core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/optimizer.hpp"
#include "qlorapp/train/train_state.hpp"

using namespace qlorapp;

namespace {

constexpr double kRate = 1e-2;

AdapterArena make_arena(at::Device device) {
  at::manual_seed(3);
  // More than two chunks, the last one short, with gaps between the entries.
  AdapterArena arena({{"a", {2900, 3001}}, {"b", {77}}, {"c", {1000, 301}}}, device);
  arena.values().copy_(at::randn({arena.values().numel()}));
  return arena;
}

void step(AdapterArena& arena, AdamW& optimizer, uint64_t seed) {
  at::manual_seed(seed);
  arena.gradients().copy_(at::randn({arena.gradients().numel()}));
  optimizer.step(kRate);
}

void require_equal(const AdamW& a, const AdamW& b) {
  const auto ours = a.state_tensors(), theirs = b.state_tensors();
  REQUIRE(ours.size() == theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    REQUIRE(ours[i].first == theirs[i].first);
    REQUIRE(at::equal(ours[i].second.cpu(), theirs[i].second.cpu()));
  }
}

struct StateFolder {
  std::string path;
  StateFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "qlorapp_XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~StateFolder() { std::filesystem::remove_all(path); }
};

}  // namespace

TEST_CASE("paged moments give the same bits wherever they are, step after step", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  AdamW::Options options;
  options.state = GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit);
  options.weight_decay = 0.01;
  AdapterArena arena = make_arena(device), paged_arena = make_arena(device);
  AdamW plain(arena, options);
  options.paged = true;
  AdamW paged(paged_arena, options);
  REQUIRE(paged.paged_state() != nullptr);
  REQUIRE(paged.state_bytes() == plain.state_bytes());
  require_equal(paged, plain);
  uint64_t seed = 0;
  for (const bool host : {false, true, true, false, true}) {
    if (host) {
      // Room is plenty, so a step would bring them back: held, they stay.
      paged.paged_state()->move_to_host();
      const auto held = paged.state_tensors();
      REQUIRE(paged.paged_state()->on_host());
      for (const auto& [name, tensor] : held) REQUIRE(tensor.is_cpu());
      step(paged_arena, paged, ++seed);
      REQUIRE(paged.paged_state()->on_host());
    } else {
      step(paged_arena, paged, ++seed);
      REQUIRE_FALSE(paged.paged_state()->on_host());
      for (const auto& [name, tensor] : paged.state_tensors()) REQUIRE(tensor.device() == device);
    }
    step(arena, plain, seed);
    REQUIRE(at::equal(paged_arena.values(), arena.values()));
    require_equal(paged, plain);
  }
}

TEST_CASE("moments that somebody holds do not move", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  AdapterArena arena = make_arena({at::kCUDA, 0});
  AdamW::Options options;
  options.paged = true;
  AdamW paged(arena, options);
  {
    const auto held = paged.state_tensors();
    REQUIRE_FALSE(paged.paged_state()->move_to_host());
  }
  REQUIRE(paged.paged_state()->move_to_host());
  REQUIRE_FALSE(paged.paged_state()->move_to_host());
  {
    const auto held = paged.state_tensors();
    REQUIRE_FALSE(paged.paged_state()->move_to_device());
  }
  REQUIRE(paged.paged_state()->move_to_device());
}

TEST_CASE("a run resumes the same from paged and unpaged moments, on the host or not", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  AdamW::Options options;
  options.state = GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit);
  const bool host = GENERATE(false, true);
  GradScaler::Options scaler;
  scaler.enabled = false;
  AdapterArena arena = make_arena(device), other_arena = make_arena(device), third_arena = make_arena(device);
  AdamW::Options paged = options;
  paged.paged = true;
  TrainState state(arena, paged, scaler);
  step(arena, state.optimizer, 1);
  if (host) state.optimizer.paged_state()->move_to_host();
  const StateFolder folder;
  state.save(folder.path);

  TrainState plain(other_arena, options, scaler), again(third_arena, paged, scaler);
  other_arena.values().copy_(arena.values());
  third_arena.values().copy_(arena.values());
  plain.load(folder.path);
  if (host) again.optimizer.paged_state()->move_to_host();
  again.load(folder.path);
  require_equal(plain.optimizer, state.optimizer);
  require_equal(again.optimizer, state.optimizer);
  step(arena, state.optimizer, 2);
  step(other_arena, plain.optimizer, 2);
  step(third_arena, again.optimizer, 2);
  REQUIRE(at::equal(other_arena.values(), arena.values()));
  REQUIRE(at::equal(third_arena.values(), arena.values()));
}

TEST_CASE("on a CPU paged moments are moments", "[train][cpu]") {
  AdamW::Options options;
  options.state = GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit);
  AdapterArena arena({{"a", {30, 31}}}, at::kCPU), paged_arena({{"a", {30, 31}}}, at::kCPU);
  AdamW plain(arena, options);
  options.paged = true;
  AdamW paged(paged_arena, options);
  REQUIRE(paged.paged_state() == nullptr);
  for (uint64_t seed = 1; seed < 4; ++seed) {
    step(arena, plain, seed);
    step(paged_arena, paged, seed);
  }
  REQUIRE(at::equal(paged_arena.values(), arena.values()));
  require_equal(paged, plain);
}
