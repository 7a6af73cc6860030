// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

#include "catch.hpp"
#include "nn/generation_cache.hpp"
#include "nn/seating.hpp"
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

/// Whether a pass of several rows has sums in another order than one of a row: so for most processors in float32 and float16, for some in bfloat16.
bool has_other_bits_in_a_batch(CausalLM& model) {
  const auto hidden = [&](size_t rows) {
    GenerationCache cache = make_cache(model, static_cast<int64_t>(rows), 8);
    std::vector<int64_t> numbers(rows), ones(rows, 1);
    std::iota(numbers.begin(), numbers.end(), int64_t{0});
    const at::Tensor tokens = at::tensor(std::vector<int64_t>(rows, 7), at::kLong).to(model.device());
    static_cast<void>(forward_cached(model, tokens, numbers, ones, cache));
    return forward_cached(model, tokens, numbers, ones, cache)[0];
  };
  return !at::equal(hidden(1), hidden(5));
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
  options.max_new_tokens = 50;
  options.cache_bytes = 53 * cache_bytes_per_position(model);
  REQUIRE(generate(model, Prompts{{1, 2, 3}}, options).front().size() == 50);
  REQUIRE_THROWS_WITH(
      generate(model, Prompts{{1, 2}, {1, 2, 3, 4}}, options),
      Catch::Matchers::ContainsSubstring("a row of 54 positions") && Catch::Matchers::ContainsSubstring("max_new_tokens (50)"));
  for (const auto& [rows, bytes] : {std::pair{0, 0}, std::pair{1, -1}}) {
    options.max_rows = rows;
    options.cache_bytes = bytes;
    REQUIRE_THROWS_AS(generate(model, Prompts{{1}}, options), ValueError);
  }
}

TEST_CASE("a prompt above the model's positions is named with its numbers and the way out, before anything is computed",
          "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);  // of 64 positions
  GenerateOptions options;
  options.max_new_tokens = 60;
  options.on_token = [](int64_t, int64_t) -> bool { throw std::logic_error("computed"); };
  const std::vector<int64_t> short_prompt(5, 1), long_prompt(64, 1);
  REQUIRE_THROWS_WITH(generate(model, Prompts{{1, 2, 3, 4}, short_prompt}, options),
                      Catch::Matchers::Equals("[generate] prompts[1] of 5 tokens and max_new_tokens (60) must fit the model's 64 "
                                              "positions. Lower max_new_tokens to 59, or shorten the prompt."));
  REQUIRE_THROWS_WITH(generate(model, Prompts{{1, 2, 3, 4}, {1}, long_prompt}, options),
                      Catch::Matchers::ContainsSubstring("prompts[2] of 64 tokens") &&
                          Catch::Matchers::EndsWith("Shorten the prompt to fewer than 64 tokens."));
  options.fits_positions = true;
  REQUIRE_THROWS_WITH(generate(model, Prompts{{1}, long_prompt}, options),
                      Catch::Matchers::ContainsSubstring("prompts[1] of 64 tokens"));
  options.fits_positions = false;
  options.on_token = {};
  REQUIRE(generate(model, Prompts{{1, 2, 3, 4}}, options).front().size() == 60);

  // Or each row ends where the positions do.
  options.fits_positions = true;
  options.cache_bytes = (64 + 61) * cache_bytes_per_position(model);
  options.max_rows = 2;
  const auto rows = generate(model, Prompts{short_prompt, {1}, std::vector<int64_t>(63, 1)}, options);
  CHECK(rows[0].size() == 59);
  CHECK(rows[1].size() == 60);
  CHECK(rows[2].size() == 1);
}

TEST_CASE("positions go as far as each rotation is made for", "[nn][cpu]") {
  using Type = format::RopeSettings::Type;
  format::ModelConfig config = tiny::make_config(tiny::kShape, 1);
  const auto limit = [&](std::initializer_list<Type> types) {
    config.ropes.clear();
    for (const Type type : types) {
      format::RopeSettings rope;
      rope.type = type;
      rope.factor = 4;
      rope.original_max_position_embeddings = 32;
      config.ropes.push_back(rope);
    }
    return position_limit(config);
  };
  CHECK(limit({Type::kDefault}) == 64);
  CHECK(limit({Type::kLlama3}) == 64);
  CHECK(limit({Type::kLongRope}) == 64);
  CHECK(limit({Type::kLinear}) == 256);  // max_position_embeddings stays that of the unscaled model
  CHECK(limit({Type::kYarn}) == 128);
  CHECK(limit({Type::kDynamic}) > int64_t{1} << 40);
  CHECK(limit({Type::kDefault, Type::kLinear}) == 64);  // some layers are not scaled
  CHECK(limit({Type::kDefault, Type::kNone}) == 64);
}

TEST_CASE("a deterministic row has the bits of the row alone, whatever is beside it", "[nn]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  CausalLM model = tiny::make_model(dtype, 0, device);
  // Pairs of tokens that a rounding decides between: rows of the head that differ in their last bits.
  at::Tensor head = model.decoder().lm_head().clone();
  const at::Tensor even = head.slice(0, 0, 66, 2);
  head.slice(0, 1, 66, 2).copy_(even + at::randn_like(even) * (even.abs().max() * (dtype == at::kFloat ? 1e-7 : 1e-3)));
  model.decoder().replace_tables(model.decoder().embed_tokens(), head);
  Prompts prompts = mixed_prompts();
  for (int64_t row = 0; row < 40; ++row) prompts.push_back({row % 67, (row * 5 + 1) % 67, (row * 3 + 2) % 67});
  GenerateOptions options;
  options.max_new_tokens = 12;
  options.eos_token_ids = {1, 9};
  Prompts alone;
  for (const auto& prompt : prompts) alone.push_back(generate(model, prompt, options));
  if (device.is_cpu() && dtype == at::kFloat && has_other_bits_in_a_batch(model))
    REQUIRE(generate(model, prompts, options) != alone);

  options.deterministic = true;
  std::vector<int64_t> heard, ended;
  options.on_token = [&](int64_t row, int64_t) { return heard.push_back(row), true; };
  options.on_end = [&](int64_t row, std::span<const int64_t>) { ended.push_back(row); };
  REQUIRE(generate(model, prompts, options) == alone);
  REQUIRE(std::ranges::is_sorted(heard));  // no pass holds two rows
  REQUIRE(std::ranges::is_sorted(ended));
  REQUIRE(std::ssize(ended) == std::ssize(prompts));
  std::ranges::reverse(prompts);
  std::ranges::reverse(alone);
  REQUIRE(generate(model, prompts, options) == alone);
}

TEST_CASE("deterministic samples follow the row's number", "[nn][cpu]") {
  CausalLM model = tiny::make_model(at::kFloat);
  const auto prompts = mixed_prompts();
  GenerateOptions options;
  options.max_new_tokens = 9;
  options.sampling = {.do_sample = true, .temperature = 1.4, .seed = 11};
  const auto together = generate(model, prompts, options);
  options.deterministic = true;
  REQUIRE(generate(model, prompts, options) == together);
}

TEST_CASE("rows that begin alike are computed together where their beginning has room once", "[nn]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  Prompts prompts(5, std::vector<int64_t>(48));
  for (auto& prompt : prompts)
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int64_t>((7 * i + 3) % 67);
  prompts[2][45] = 1;
  GenerateOptions options;
  options.max_new_tokens = 8;
  options.sampling = {.do_sample = true, .seed = 3, .torch_draws = true};  // all rows at once, or none
  // A whole row of 56, and four that share 32 of it: whole units.
  const int64_t positions = 56 + 4 * 24, bytes = cache_bytes_per_position(model);
  options.cache_bytes = positions * bytes;
  at::manual_seed(5);
  const Prompts once = generate(model, prompts, options);
  options.cache_bytes = 0;
  at::manual_seed(5);
  REQUIRE(generate(model, prompts, options) == once);
  options.cache_bytes = (positions - 1) * bytes;
  REQUIRE_THROWS_WITH(generate(model, prompts, options), Catch::Matchers::ContainsSubstring("all 5 rows are computed at once"));
}

TEST_CASE("a pass has the same bits wherever its rows' keys are", "[nn]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  const bool is_wide = GENERATE(false, true);  // as a pass in one launch requires; its keys are divided among several CTAs
  DecoderBlock::Shape shape = tiny::kShape;
  if (is_wide) shape.hidden = 256, shape.intermediate = 512, shape.heads = 4, shape.head_dim = 64;
  CausalLM model = tiny::make_model(dtype, 0, device, is_wide ? 2 : 4, shape);
  constexpr int64_t kRows = 3;
  const int64_t room = is_wide ? 620 : 40, begin = is_wide ? 512 : 16;
  GenerationCache apart = make_cache(model, kRows, room), shared = make_cache(model, kRows, room);
  std::vector<int64_t> numbers(kRows), counts{30, 25, 27};
  if (is_wide) counts = {600, 540, 560};
  std::iota(numbers.begin(), numbers.end(), int64_t{0});
  std::vector<int64_t> tokens;
  for (const int64_t count : counts)
    for (int64_t i = 0; i < count; ++i) tokens.push_back((i < begin ? 7 * i + 3 : 5 * i + count) % 67);
  const auto sent = [&](const std::vector<int64_t>& list) { return at::tensor(list, at::kLong).to(device); };
  static_cast<void>(forward_cached(model, sent(tokens), numbers, counts, apart));
  // The first positions are those of the first row for all; what was there of the others is overwritten.
  shared.lengths = apart.lengths;
  for (size_t i = 0; i < apart.blocks.size(); ++i) {
    for (const auto& [from, to] :
         {std::pair{&apart.blocks[i].keys, &shared.blocks[i].keys}, std::pair{&apart.blocks[i].values, &shared.blocks[i].values}}) {
      for (int64_t row = 1; row < kRows; ++row) from->narrow(0, row * room, begin).copy_(from->narrow(0, 0, begin));
      to->copy_(*from);
      for (int64_t row = 1; row < kRows; ++row) to->narrow(0, row * room, begin).fill_(100.0);
    }
  }
  for (int64_t row = 1; row < kRows; ++row)
    shared.places[static_cast<size_t>(row)] = {.start = row * room, .shared_start = 0, .shared = begin};
  const std::vector<int64_t> ones(kRows, 1), two{2, 1, 2};
  for (int64_t step = 0; step < 6; ++step) {  // on a GPU also recorded
    const at::Tensor next = sent({step, step + 9, 2 * step});
    const at::Tensor want = forward_cached(model, next, numbers, ones, apart);
    REQUIRE(at::equal(forward_cached(model, next, numbers, ones, shared), want));
  }
  const at::Tensor next = sent({1, 2, 3, 4, 5});
  const at::Tensor want = forward_cached(model, next, numbers, two, apart);
  REQUIRE(at::equal(forward_cached(model, next, numbers, two, shared), want));
}

TEST_CASE("free slots become one range again", "[nn][cpu]") {
  SlotArena arena(10);
  const auto first = arena.take(4);
  auto second = arena.take(4);
  REQUIRE(first->first() == 0);
  REQUIRE(second->first() == 4);
  REQUIRE_FALSE(arena.take(4));
  auto third = arena.take(2);
  REQUIRE(third->first() == 8);
  second.reset();
  third.reset();
  REQUIRE(arena.take(6)->first() == 4);
  REQUIRE_FALSE(arena.take(7));
}

TEST_CASE("rows that begin alike hold one range", "[nn][cpu]") {
  // 100 tokens, of which 83 are alike; the third has 98 of the first, the fourth nothing, the last all.
  Seating::Prompts prompts(5, std::vector<int64_t>(100, 1));
  for (const auto& [row, from] : std::vector<std::pair<size_t, size_t>>{{1, 83}, {2, 98}, {3, 0}})
    std::fill(prompts[row].begin() + static_cast<int64_t>(from), prompts[row].end(), 1 + static_cast<int64_t>(row));
  const std::vector<int64_t> shared = shared_beginnings(prompts, {0, 0, 0, 0, 0}, 4);
  REQUIRE(shared == std::vector<int64_t>{0, 80, 96, 0, 96});
  REQUIRE(shared_beginnings(prompts, {0, 1, -1, 0, -1}, 4) == std::vector<int64_t>(5, 0));
  {  // The third begins with 80 of the first, and the fourth with 96 of the third, or 112: so many that the third is whole.
    for (const int64_t more : {96, 112}) {
      Seating::Prompts chain(4, std::vector<int64_t>(120, 1));
      std::fill(chain[2].begin() + 80, chain[2].end(), 2);
      chain[3] = chain[2];
      chain[3][static_cast<size_t>(more)] = 3;
      const std::vector<int64_t> of_chain = shared_beginnings(chain, {0, 0, 0, 0}, 4);
      REQUIRE(of_chain == (more == 96 ? std::vector<int64_t>{0, 112, 80, 80} : std::vector<int64_t>{0, 112, 0, 112}));
    }
  }
  Seating seating(prompts, 4, 264);
  std::vector<Seating::Placed> placed;
  for (size_t row = 0; row < 4; ++row) {
    const Seating::Beginning beginning = seating.beginning_of(row);
    REQUIRE(beginning.shared == shared[row]);
    placed.push_back(*seating.enter(row, 110, beginning));
  }
  const auto slot = [&](size_t row, int64_t p) {
    const RowPlace& place = placed[row].place;
    return p + (p < place.shared ? place.shared_start : place.start);
  };
  for (int64_t p = 0; p < 110; ++p) {
    REQUIRE((slot(0, p) == slot(1, p)) == (p < 80));
    REQUIRE((slot(0, p) == slot(2, p)) == (p < 96));
  }
  std::vector<int64_t> used;
  for (size_t row = 0; row < 4; ++row)
    for (int64_t p = 0; p < 110; ++p) used.push_back(slot(row, p));
  std::ranges::sort(used);
  REQUIRE(used.front() == 0);
  REQUIRE(used.back() == 263);
  REQUIRE(std::ranges::unique(used).begin() - used.begin() == 264);

  // A stem outlives the rows that hold it, until room is short.
  seating.leave(placed[0].seat);
  seating.leave(placed[1].seat);
  seating.leave(placed[2].seat);
  REQUIRE(seating.beginning_of(4).shared == 96);
  const Seating::Placed again = *seating.enter(4, 110, seating.beginning_of(4));
  REQUIRE(again.place.shared_start == placed[2].place.shared_start);
  seating.leave(again.seat);
  const Seating::Placed other = *seating.enter(4, 154, {});
  REQUIRE(other.place.shared == 0);
  REQUIRE(seating.taken() == 2);
  REQUIRE_FALSE(seating.enter(1, 200, {}));
}
