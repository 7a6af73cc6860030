// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "catch.hpp"
#include "nn/generation_cache.hpp"
#include "nn/slot_arena.hpp"
#include "nn/tiny_model.hpp"

using namespace qlorapp;

namespace {

using Prompts = std::vector<std::vector<int64_t>>;

/// Some share a long beginning, some are equal, some have one token.
Prompts mixed_prompts() {
  Prompts prompts;
  std::vector<int64_t> system(40);
  for (size_t i = 0; i < system.size(); ++i) system[i] = static_cast<int64_t>((7 * i + 3) % 67);
  for (int64_t row = 0; row < 23; ++row) {
    std::vector<int64_t> prompt = row % 3 == 0 ? system : std::vector<int64_t>{};
    for (int64_t i = 0; i <= row % 5 * 2; ++i) prompt.push_back((row * 11 + i * i) % 67);
    prompts.push_back(std::move(prompt));
  }
  prompts.push_back(prompts[3]);
  prompts.push_back(prompts[3]);
  return prompts;
}

}  // namespace

TEST_CASE("rows that come and go are those of each prompt alone", "[nn]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  const auto prompts = mixed_prompts();
  GenerateOptions options;
  options.max_new_tokens = 12;
  options.min_new_tokens = 2;
  options.eos_token_ids = {1, 9, 17, 25, 33, 41, 49};
  options.sampling.repetition_penalty = GENERATE(1.0, 1.3);
  Prompts alone;
  for (const auto& prompt : prompts) alone.push_back(generate(model, prompt, options));
  REQUIRE(std::ranges::any_of(alone, [](const auto& row) { return row.size() < 12; }));

  std::map<int64_t, std::vector<int64_t>> ended, heard;
  options.on_end = [&](int64_t row, std::span<const int64_t> tokens) {
    REQUIRE(ended.emplace(row, std::vector(tokens.begin(), tokens.end())).second);
  };
  options.on_token = [&](int64_t row, int64_t token) { return heard[row].push_back(token), true; };
  const auto [rows, positions] = GENERATE(std::pair{128, 0}, std::pair{4, 0}, std::pair{128, 130}, std::pair{1, 61});
  options.max_rows = rows;
  options.cache_bytes = positions * cache_bytes_per_position(model);
  REQUIRE(generate(model, prompts, options) == alone);
  for (size_t row = 0; row < prompts.size(); ++row) {
    REQUIRE(ended.at(static_cast<int64_t>(row)) == alone[row]);
    REQUIRE(heard.at(static_cast<int64_t>(row)) == alone[row]);
  }
}

TEST_CASE("samples depend on their row's number and position, not on what is beside them", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const auto prompts = mixed_prompts();
  GenerateOptions options;
  options.max_new_tokens = 9;
  options.sampling = {.do_sample = true, .temperature = 1.4, .seed = 11};
  const auto together = generate(model, prompts, options);
  options.max_rows = 3;
  REQUIRE(generate(model, prompts, options) == together);
  REQUIRE(together[23] != together[24]);  // one prompt, two samples
}

TEST_CASE("a row that the cache cannot hold is named with its numbers", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  GenerateOptions options;
  options.max_new_tokens = 100;
  options.cache_bytes = 103 * cache_bytes_per_position(model);
  REQUIRE(generate(model, Prompts{{1, 2, 3}}, options).front().size() == 100);
  REQUIRE_THROWS_WITH(
      generate(model, Prompts{{1, 2}, {1, 2, 3, 4}}, options),
      Catch::Matchers::ContainsSubstring("a row of 104 positions") && Catch::Matchers::ContainsSubstring("max_new_tokens (100)"));
  for (const auto& [rows, bytes] : {std::pair{0, 0}, std::pair{1, -1}}) {
    options.max_rows = rows;
    options.cache_bytes = bytes;
    REQUIRE_THROWS_AS(generate(model, Prompts{{1}}, options), ValueError);
  }
}

TEST_CASE("free slots become one range again", "[nn][cpu]") {
  SlotArena arena(10);
  REQUIRE(arena.take(4) == 0);
  REQUIRE(arena.take(4) == 4);
  REQUIRE_FALSE(arena.take(4));
  REQUIRE(arena.take(2) == 8);
  arena.give_back(4, 4);
  arena.give_back(8, 2);
  REQUIRE(arena.take(6) == 4);
  arena.give_back(4, 6);
  arena.give_back(0, 4);
  REQUIRE(arena.take(10) == 0);
}
