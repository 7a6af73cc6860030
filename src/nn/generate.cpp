// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "nn/generation_cache.hpp"
#include "nn/generation_size.hpp"
#include "nn/host_values.hpp"
#include "nn/seating.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/core/units.hpp"

namespace qlorapp {
namespace {

using Prompts = std::vector<std::vector<int64_t>>;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
/// In place of a token that cannot be drawn.
constexpr int64_t kNone = -1;
/// Rows whose angles do not depend on their length, or not while they are here, may stand beside each other.
enum class Angles : uint8_t { kShort, kLong, kChanging };

Angles angles_of(const format::ModelConfig& config, int64_t prompt, int64_t most) {
  Angles found = Angles::kShort;
  for (const format::RopeSettings& rope : config.ropes) {
    if (!is_long_for(rope, most)) continue;
    const bool stay = rope.type == format::RopeSettings::Type::kLongRope && is_long_for(rope, prompt);
    found = std::max(found, stay ? Angles::kLong : Angles::kChanging);
  }
  return found;
}

/// Whether the cache's keys turned by other angles than those of a row of this length do (longrope). They are then formed again, as
/// transformers does for Phi-3.
bool outgrows(const format::ModelConfig& config, int64_t before, int64_t now) {
  return std::ranges::any_of(config.ropes, [&](const format::RopeSettings& rope) {
    return rope.type == format::RopeSettings::Type::kLongRope && is_long_for(rope, before) != is_long_for(rope, now);
  });
}

class Generation {
 public:
  /// @param first  the number of the first prompt among the caller's.
  Generation(CausalLM& model, const Prompts& prompts, const GenerateOptions& options, int64_t first = 0)
      : model_(model),
        prompts_(prompts),
        options_(options),
        first_(first),
        generated_(prompts.size()),
        rooms_(rooms()),
        slots_(slots_of_rows()),
        size_(generation_size(std::ranges::max(rooms_), slots_, options.max_new_tokens, options.max_rows,
                              cache_per_position(model.config(), model.dtype()), cache_bytes())),
        seating_(prompts, size_.rows, size_.slots),
        cache_(make_cache(model, size_.rows, size_.longest, size_.slots)) {
    cache_.adapters_are_constant = true;
    if (draws_as_torch()) check_draws();
    if (options.min_new_tokens > 0) ends_ = ends();
    if (is_penalized())
      seen_ = at::zeros({size_.rows, model.config().vocab_size}, at::TensorOptions(model.device()).dtype(at::kBool));
  }

  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;
  ~Generation() {
    if (!ahead_ || !draws_as_torch()) return;
    at::Generator drawn = generator();  // the numbers of a pass whose tokens were not read go back
    const std::lock_guard lock(drawn.mutex());
    drawn.set_offset(before_noise_);
  }

  Prompts run() {
    enter();
    while (next_ < prompts_.size() || seating_.taken() > 0) {
      if (seating_.taken() > 0) pass();  // the first tokens can end all
      enter();
    }
    return std::move(generated_);
  }

 private:
  /// A row's tokens that a pass computes.
  struct Part {
    int64_t seat = 0;
    std::span<const int64_t> tokens;
  };

  [[nodiscard]] bool draws_as_torch() const { return options_.sampling.do_sample && options_.sampling.torch_draws; }
  [[nodiscard]] at::Generator generator() const { return at::globalContext().defaultGenerator(model_.device()); }
  /// torch.multinomial draws for all rows at once.
  void check_draws() const {
    const int64_t wanted = std::accumulate(slots_.begin(), slots_.end(), int64_t{0});
    bool are_alike = true;
    for (size_t row = 0; row < prompts_.size(); ++row) are_alike = are_alike && angles_of_row(row) == angles_of_row(0);
    QLORAPP_CHECK_VALUE(
        size_.rows == std::ssize(prompts_) && size_.slots >= wanted && are_alike &&
            (prompts_.size() == 1 || angles_of_row(0) != Angles::kChanging),
        "[generate] torch_draws requires that all {} rows are computed at once; {} are. Leave it out, or raise max_rows and "
        "cache_bytes.",
        prompts_.size(), size_.rows);
  }
  /// For these rows, (R, V). Each position draws once, for all rows.
  [[nodiscard]] at::Tensor noise_at(int64_t position, const std::vector<int64_t>& numbers) {
    if (position != noise_position_) {
      if (model_.device().is_cuda()) {
        at::Generator drawn = generator();
        const std::lock_guard lock(drawn.mutex());
        before_noise_ = drawn.get_offset();
      }
      noise_ = at::empty({std::ssize(prompts_), model_.config().vocab_size}, at::TensorOptions(model_.device()).dtype(at::kFloat))
                   .exponential_(1, generator());
      noise_position_ = position;
    }
    return std::ssize(numbers) == noise_.size(0) && std::ranges::is_sorted(numbers) ? noise_
                                                                                    : noise_.index_select(0, sent(numbers));
  }

  /// Among the caller's prompts.
  [[nodiscard]] int64_t number_of(size_t row) const { return first_ + static_cast<int64_t>(row); }
  [[nodiscard]] bool is_penalized() const { return options_.sampling.repetition_penalty != 1.0; }
  [[nodiscard]] int64_t most_of(size_t row) const { return new_tokens_of(model_.config(), std::ssize(prompts_[row]), options_); }
  [[nodiscard]] Angles angles_of_row(size_t row) const {
    return angles_of(model_.config(), std::ssize(prompts_[row]), std::ssize(prompts_[row]) + most_of(row));
  }
  [[nodiscard]] Bytes cache_bytes() const {
    if (options_.cache_bytes > 0) return Bytes{options_.cache_bytes};
    constexpr int64_t kDrawn =
        6 * sizeof(float);  // of a logit: scores, probabilities, torch's numbers, and on a CPU what sorts them
    const int64_t drawn =
        draws_as_torch() ? kDrawn * std::min(options_.max_rows, std::ssize(prompts_)) * model_.config().vocab_size : 0;
    return Bytes{std::max<int64_t>(ops::free_memory(model_.device()).count / 10 * 9 - drawn, 0)};
  }
  [[nodiscard]] at::Tensor sent(const std::vector<int64_t>& values) const { return on_device(values, model_.device()); }

  [[nodiscard]] std::vector<int64_t> rooms() const {
    std::vector<int64_t> found;
    for (size_t row = 0; row < prompts_.size(); ++row) found.push_back(std::ssize(prompts_[row]) + most_of(row));
    return found;
  }
  [[nodiscard]] std::vector<int64_t> slots_of_rows() const {
    std::vector<int64_t> found = rooms_;
    const std::vector<int64_t> shared = shared_tokens(model_.config(), prompts_, options_);
    for (size_t row = 0; row < found.size(); ++row) found[row] -= shared[row];
    return found;
  }

  /// Seats waiting prompts, in their order, and computes them. Unless no row is left, some seats must be free: a pass of few prompts costs as
  /// much as one of some more.
  void enter() {
    const int64_t waiting = std::ssize(prompts_) - static_cast<int64_t>(next_);
    if (seating_.taken() > 0 && seating_.free() < std::min(waiting, std::max<int64_t>(size_.rows / 8, 1))) return;
    std::vector<int64_t> entered;
    for (; next_ < prompts_.size() && seating_.free() > 0; ++next_) {
      const Angles angles = angles_of_row(next_);
      const bool is_other = angles != angles_ || angles == Angles::kChanging;
      if (seating_.taken() > 0 && is_other) break;
      if (is_other) seating_.forget();
      const std::optional<Seating::Placed> placed = seating_.enter(next_, rooms_[next_], seating_.beginning_of(next_));
      if (!placed) break;
      angles_ = angles;
      cache_.places[static_cast<size_t>(placed->seat)] = placed->place;
      cache_.lengths[static_cast<size_t>(placed->seat)] = placed->place.shared;
      entered.push_back(placed->seat);
      if (is_penalized()) {
        seen_.select(0, placed->seat).zero_();
        seen_.select(0, placed->seat).index_fill_(0, sent(prompts_[next_]), true);
      }
    }
    // All have their places before a first token can end one of them.
    std::vector<Part> whole, rest;
    int64_t tokens = 0;
    for (const int64_t seat : entered) {
      const int64_t shared = cache_.place(seat).shared;
      const std::span<const int64_t> own = std::span(prompts_[*seating_.row(seat)]).subspan(static_cast<size_t>(shared));
      if (tokens > 0 && tokens + std::ssize(own) > kTokensAtOnce) {
        compute(std::exchange(whole, {}));
        compute(std::exchange(rest, {}));
        tokens = 0;
      }
      tokens += std::ssize(own);
      (shared == 0 ? whole : rest).push_back({seat, own});
    }
    compute(whole);
    compute(rest);  // their beginnings are there now
  }

  /// Tokens of some rows, chosen on the device.
  struct Chosen {
    std::vector<int64_t> seats;
    std::vector<size_t> rows;  ///< Of the seats, then.
    at::Tensor tokens;         ///< (R) int64.
    ArrivingValues host;       ///< The same.
  };

  /// One more token of each row. On a GPU the next pass is launched before the tokens are read that it continues; what it computes of a row
  /// that they end is dropped.
  void pass() {
    const Chosen chosen = ahead_ ? *std::exchange(ahead_, std::nullopt) : launch(next_parts());
    if (goes_on()) ahead_ = launch_behind(chosen);
    take(chosen);
  }

  [[nodiscard]] std::vector<Part> next_parts() {
    std::vector<Part> parts;
    for (int64_t seat = 0; seat < size_.rows; ++seat) {
      const std::optional<size_t>& row = seating_.row(seat);
      if (!row) continue;
      int64_t& length = cache_.lengths[static_cast<size_t>(seat)];
      if (outgrows(model_.config(), length, length + 1)) {  // it is the only row
        again_ = prompts_[*row];
        again_.insert(again_.end(), generated_[*row].begin(), generated_[*row].end());
        length = 0;
        parts.push_back({seat, again_});
      } else {
        parts.push_back({seat, std::span(generated_[*row]).last(1)});
      }
    }
    return parts;
  }

  /// Whether a pass may follow one whose tokens have not been read: no prompt waits for a seat that they could free, and no row's angles change.
  [[nodiscard]] bool goes_on() const {
    if (!model_.device().is_cuda() || next_ < prompts_.size()) return false;
    const auto changes = [&](int64_t length) { return outgrows(model_.config(), length, length + 1); };
    for (int64_t seat = 0; seat < size_.rows; ++seat) {
      if (seating_.row(seat) && changes(cache_.lengths[static_cast<size_t>(seat)])) return false;
    }
    return true;
  }

  /// Of the rows that need a token behind those; nothing where there are none.
  [[nodiscard]] std::optional<Chosen> launch_behind(const Chosen& before) {
    std::vector<int64_t> seats, positions, kept;
    for (size_t i = 0; i < before.seats.size(); ++i) {
      const size_t row = before.rows[i];
      const int64_t position = std::ssize(generated_[row]) + 1;
      if (seating_.row(before.seats[i]) != row || position >= most_of(row)) continue;
      seats.push_back(before.seats[i]);
      positions.push_back(position);
      kept.push_back(static_cast<int64_t>(i));
    }
    if (kept.empty()) return std::nullopt;
    const at::Tensor tokens = kept.size() == before.seats.size() ? before.tokens : before.tokens.index_select(0, sent(kept));
    return choose(options_.sampling.do_sample ? tokens.clamp_min(0) : tokens, std::move(seats),
                  std::vector<int64_t>(kept.size(), 1), positions);
  }

  [[nodiscard]] Chosen launch(const std::vector<Part>& parts) {
    std::vector<int64_t> tokens, counts, seats, positions;
    for (const Part& part : parts) {
      tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
      counts.push_back(std::ssize(part.tokens));
      seats.push_back(part.seat);
      positions.push_back(std::ssize(generated_[*seating_.row(part.seat)]));
    }
    return choose(sent(tokens), std::move(seats), counts, positions);
  }

  /// @param tokens  counts[i] of each seat.  @param positions  new tokens that the rows have.
  [[nodiscard]] Chosen choose(const at::Tensor& tokens, std::vector<int64_t> seats, const std::vector<int64_t>& counts,
                              const std::vector<int64_t>& positions) {
    std::vector<size_t> rows;
    std::vector<int64_t> numbers;
    for (const int64_t seat : seats) {
      rows.push_back(*seating_.row(seat));
      numbers.push_back(number_of(rows.back()));
    }
    const at::Tensor logits = model_.logits(forward_cached(model_, tokens, seats, counts, cache_));
    const at::Tensor seat_ids = is_penalized() ? sent(seats) : at::Tensor();
    const at::Tensor scores = warped_logits(logits, is_penalized() ? seen_.index_select(0, seat_ids) : at::Tensor(),
                                            blocked_now(positions), options_.sampling);
    const at::Tensor chosen = draws_as_torch() ? choose_tokens(scores, noise_at(positions.front(), numbers))
                                               : choose_tokens(scores, numbers, positions, options_.sampling);
    if (options_.sampling.do_sample) chosen.masked_fill_(scores.amax(-1).isfinite().logical_not_(), kNone);
    if (is_penalized()) seen_.index_put_({seat_ids, chosen.clamp_min(0)}, at::ones({}, seen_.options()));
    return {std::move(seats), std::move(rows), chosen, ArrivingValues(chosen)};
  }

  void compute(const std::vector<Part>& parts) {
    if (!parts.empty()) take(launch(parts));
  }

  /// Reads them.
  void take(const Chosen& chosen) {
    const std::vector<int64_t> tokens = chosen.host.read();
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (seating_.row(chosen.seats[i]) != chosen.rows[i]) continue;
      if (tokens[i] == kNone) {
        throw Error(
            message("[generate] no token can be drawn for row {}: its logits are infinite or NaN after {} new tokens. Look at the "
                    "weights, at the training of the adapter, and at the temperature.",
                    number_of(chosen.rows[i]), generated_[chosen.rows[i]].size()));
      }
      take(chosen.seats[i], tokens[i]);
    }
  }

  void take(int64_t seat, int64_t token) {
    const size_t own = *seating_.row(seat);
    std::vector<int64_t>& text = generated_[own];
    text.push_back(token);
    const int64_t row = number_of(own);
    const bool ended = std::ranges::find(options_.eos_token_ids, token) != options_.eos_token_ids.end();
    const bool wanted = !options_.on_token || options_.on_token(row, token);
    if (!ended && wanted && std::ssize(text) < most_of(own)) return;
    seating_.leave(seat);
    if (options_.on_end) options_.on_end(row, text);
  }

  /// The eos tokens that the model has at all: (V) bool on the device.
  [[nodiscard]] at::Tensor ends() const {
    const at::Tensor found = at::zeros({model_.config().vocab_size}, at::kBool);
    for (const int64_t id : options_.eos_token_ids) {
      if (id >= 0 && id < model_.config().vocab_size) found.select(0, id).fill_(true);
    }
    return found.to(model_.device());
  }
  /// The same in rows where they are not allowed yet.
  [[nodiscard]] at::Tensor blocked_now(const std::vector<int64_t>& positions) const {
    if (std::ranges::min(positions) >= options_.min_new_tokens) return {};
    if (std::ranges::max(positions) < options_.min_new_tokens) return ends_;
    return sent(positions).lt(options_.min_new_tokens).unsqueeze(1).logical_and(ends_);
  }

  CausalLM& model_;
  const Prompts& prompts_;
  const GenerateOptions& options_;
  int64_t first_;
  Prompts generated_;
  std::vector<int64_t> rooms_, slots_;  ///< Positions of each row, and the slots that it takes.
  GenerationSize size_;
  Seating seating_;
  GenerationCache cache_;
  at::Tensor seen_;  ///< (seats, V) bool.
  at::Tensor ends_;  ///< As ends(), where some tokens come before them.
  Angles angles_ = Angles::kShort;
  size_t next_ = 0;              ///< The first prompt that has no seat yet.
  std::optional<Chosen> ahead_;  ///< Of a pass that is launched already.
  at::Tensor noise_;             ///< Of all rows, at a position; where torch's numbers are drawn.
  int64_t noise_position_ = -1;
  uint64_t before_noise_ = 0;   ///< The generator's offset then.
  std::vector<int64_t> again_;  ///< Of a row that is computed again.
};

/// As Generation, of one row after the other.
Prompts generate_alone(CausalLM& model, const Prompts& prompts, const GenerateOptions& options) {
  Prompts generated;
  for (size_t row = 0; row < prompts.size(); ++row) {
    const Prompts one{prompts[row]};
    generated.push_back(std::move(Generation(model, one, options, static_cast<int64_t>(row)).run().front()));
  }
  return generated;
}

/// Positions of one kind of layer.
int64_t limit_of(const format::RopeSettings& rope, int64_t positions) {
  using enum format::RopeSettings::Type;
  const auto times = [&](int64_t count) {
    constexpr double kMost = 0x1p53;
    return std::max(positions, static_cast<int64_t>(std::min(kMost, static_cast<double>(count) * rope.factor)));
  };
  switch (rope.type) {
    case kDynamic:
      return kNoLimit;
    case kLinear:
      return times(positions);
    case kYarn:
      return times(rope.original_max_position_embeddings);
    default:
      return positions;
  }
}

/// Runs after loading: errors in the files of the model come first, and an adapter can add tokens.
void check_tokens(const CausalLM& model, const Prompts& prompts) {
  const int64_t vocabulary = model.config().vocab_size;
  for (const std::vector<int64_t>& prompt : prompts) {
    for (size_t i = 0; i < prompt.size(); ++i) {
      QLORAPP_CHECK_VALUE(prompt[i] >= 0 && prompt[i] < vocabulary,
                          "[generate] token {} of the prompt must be in [0, {}); got {}. Does the tokenizer belong to the model?",
                          i, vocabulary, prompt[i]);
    }
  }
}

}  // namespace

int64_t position_limit(const format::ModelConfig& config) {
  int64_t least = kNoLimit;
  for (const format::RopeSettings& rope : config.ropes) least = std::min(least, limit_of(rope, config.max_position_embeddings));
  return least;
}

void check_generation(const format::ModelConfig& config, const Prompts& prompts, const GenerateOptions& options,
                      const std::vector<std::string>& places) {
  QLORAPP_CHECK_VALUE(options.max_new_tokens >= 1, "[generate] max_new_tokens must be at least 1; got {}.", options.max_new_tokens);
  QLORAPP_CHECK_VALUE(options.min_new_tokens >= 0, "[generate] min_new_tokens must be at least 0; got {}.", options.min_new_tokens);
  QLORAPP_CHECK_VALUE(options.max_rows >= 1, "[generate] max_rows must be at least 1; got {}.", options.max_rows);
  QLORAPP_CHECK_VALUE(options.cache_bytes >= 0, "[generate] cache_bytes must be at least 0; got {}.", options.cache_bytes);
  options.sampling.validate();
  QLORAPP_CHECK_VALUE(
      !options.deterministic || !options.sampling.torch_draws,
      "[generate] torch_draws computes all rows at once, deterministic one after the other. Leave out one of them.");
  QLORAPP_CHECK_VALUE(!prompts.empty(), "[generate] there must be a prompt; got none.");
  const int64_t positions = position_limit(config);
  for (size_t row = 0; row < prompts.size(); ++row) {
    const std::vector<int64_t>& prompt = prompts[row];
    QLORAPP_CHECK_VALUE(!prompt.empty(), "[generate] the prompt must hold at least one token; got none.");
    const int64_t tokens = std::ssize(prompt), left = positions - tokens;
    QLORAPP_CHECK_VALUE(left > 0 && (options.fits_positions || options.max_new_tokens <= left),
                        "[{}] {} of {} tokens and max_new_tokens ({}) must fit the model's {} positions. {}.",
                        places.empty() ? "generate" : places[row], places.empty() ? message("prompts[{}]", row) : "the prompt",
                        tokens, options.max_new_tokens, positions,
                        left > 0 ? message("Lower max_new_tokens to {}, or shorten the prompt", left)
                                 : message("Shorten the prompt to fewer than {} tokens", positions));
  }
}

std::vector<int64_t> shared_tokens(const format::ModelConfig& config, const Prompts& prompts, const GenerateOptions& options) {
  std::vector<int> kinds;
  for (const std::vector<int64_t>& prompt : prompts) {
    const int64_t tokens = std::ssize(prompt);
    const Angles angles = angles_of(config, tokens, tokens + new_tokens_of(config, tokens, options));
    kinds.push_back(angles == Angles::kChanging || options.deterministic ? -1 : static_cast<int>(angles));
  }
  return shared_beginnings(prompts, kinds, options.max_rows);
}

int64_t new_tokens_of(const format::ModelConfig& config, int64_t prompt_tokens, const GenerateOptions& options) {
  return std::min(options.max_new_tokens, position_limit(config) - prompt_tokens);
}

std::vector<std::vector<int64_t>> generate(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                           const GenerateOptions& options) {
  check_generation(model.config(), prompts, options);
  check_tokens(model, prompts);
  const at::NoGradGuard no_grad;
  return options.deterministic ? generate_alone(model, prompts, options) : Generation(model, prompts, options).run();
}

std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options) {
  return std::move(generate(model, std::vector<std::vector<int64_t>>{prompt}, options).front());
}

}  // namespace qlorapp
