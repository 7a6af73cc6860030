// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/budget.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <vector>

#include "core/check.hpp"
#include "nn/block/decoder_block.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/memory/roofline.hpp"

namespace qlorapp {
namespace {

std::string percent(double part) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100 * part);
  return text.data();
}

/// The first blocks have one policy, the last `count` a richer one.
struct Mixture {
  Keep lower, upper;
  int64_t count = 0;

  [[nodiscard]] std::string text(int64_t blocks) const {
    if (count == 0) return std::string(to_string(lower));
    if (count == blocks) return std::string(to_string(upper));
    return message("{},{}:{}", to_string(lower), to_string(upper), count);
  }
};

/// One way to take a step, of which only the mixture's count is open.
struct Way {
  int64_t batch;
  MemorySettings memory;
  Mixture mixture;
};

class Search {
 public:
  Search(const PlanSettings& settings, const Gpu& rates, const BudgetRequest& request)
      : asked_(settings),
        rates_(rates),
        room_(request.room),
        length_(request.average_length > 0 ? request.average_length : static_cast<double>(settings.length)),
        blocks_(settings.model.num_hidden_layers) {
    const bool chooses = request.effective_batch > 0;
    rows_ = chooses ? request.effective_batch : settings.batch * settings.accumulation;
    if (!chooses) batches_ = {settings.batch};
    for (int64_t batch = 1; chooses && batch <= rows_ && (batch == 1 || batch * settings.length <= kMostTokens); ++batch) {
      if (rows_ % batch == 0) batches_.push_back(batch);
    }
  }

  /// Filled in for a way: the settings that the planner and the roofline take.
  [[nodiscard]] PlanSettings settings_of(const Way& way) const {
    PlanSettings settings = asked_;
    settings.batch = way.batch;
    settings.accumulation = std::max<int64_t>(1, rows_ / way.batch);
    settings.memory = way.memory;
    settings.segments = parse_segments(way.mixture.text(blocks_), blocks_);
    return settings;
  }

  [[nodiscard]] double seconds(const Way& way) const {
    const PlanSettings settings = settings_of(way);
    const StepTime time = step_time(settings, rates_, length_);
    return time.micro_batch() * static_cast<double>(settings.accumulation) + time.optimizer;
  }

  [[nodiscard]] MemoryPlan plan(const Way& way) const { return plan_memory(settings_of(way), room_); }
  [[nodiscard]] bool fits(const Way& way) const { return plan(way).fits; }
  /// What is in use at the fullest moment of training.
  [[nodiscard]] Bytes need(const Way& way) const {
    const MemoryPlan found = plan_memory(settings_of(way));
    return found.training_peak();
  }

  /// The fastest that fits; none: nothing does.
  [[nodiscard]] std::optional<Way> best() {
    std::vector<std::pair<double, Way>> ways;  // by what they would take if all blocks had the richer policy
    for (const int64_t batch : batches_) {
      for (const MemorySettings& memory : ways_to_save(batch)) {
        for (const Mixture& mixture : mixtures()) {
          Way way{batch, memory, mixture};
          way.mixture.count = blocks_;
          ways.emplace_back(seconds(way), way);
        }
      }
    }
    const auto by_time = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::stable_sort(ways.begin(), ways.end(), by_time);
    std::optional<Way> found;
    double least = 0;
    for (auto& [bound, way] : ways) {
      if (found && bound >= least * kWorthIt) break;  // not even with all blocks richer
      const int64_t most = most_richer(way);
      way.mixture.count = most;
      if (most < 0 || (found && seconds(way) >= least * kWorthIt) || !fill(way, most)) continue;
      const double own = seconds(way);
      if (found && own >= least) continue;
      found = way;
      least = own;
    }
    return found;
  }

  /// The smallest step there is.
  [[nodiscard]] Way smallest() const {
    return {batches_.front(), ways_to_save(batches_.front()).back(), {mixtures().front().lower, mixtures().front().lower, 0}};
  }
  [[nodiscard]] int64_t blocks() const { return blocks_; }

  /// As many changes, each smaller and slower than the one before.
  [[nodiscard]] std::vector<MemorySettings> ways_to_save(int64_t batch) const {
    MemorySettings own = asked_.memory;
    std::vector<MemorySettings> ways{own};
    const auto add = [&](auto change) {
      change(own);
      if (own != ways.back()) ways.push_back(own);
    };
    const bool gpu = asked_.device.type == at::kCUDA;
    if (gpu && !asked_.model.tie_word_embeddings) add([](MemorySettings& m) { m.embedding_on_host = true; });
    add([](MemorySettings& m) { m.loss_chunk_rows = m.loss_chunk_rows > 0 ? std::min<int64_t>(m.loss_chunk_rows, 512) : 512; });
    if (gpu) add([](MemorySettings& m) { m.weight_workspace = std::max(m.weight_workspace, WeightWorkspace::kStack); });
    const int64_t quarter =
        (batch * asked_.length / 4 + MemorySettings::kTileStep - 1) / MemorySettings::kTileStep * MemorySettings::kTileStep;
    const int64_t tile = std::max<int64_t>(1024, quarter);  // a few large ones: each dequantizes its weights again
    add([&](MemorySettings& m) { m.mlp_tile_rows = m.mlp_tile_rows > 0 ? std::min(m.mlp_tile_rows, tile) : tile; });
    return ways;
  }

 private:
  /// What is known of the poorer policy in all blocks.
  struct Least {
    Way way;
    bool fits = false;
    Bytes loss;  ///< In use when the loss is formed: all that blocks keep is there then.
  };

  const Least& least_of(const Way& way) {
    for (const Least& known : tried_) {
      if (known.way.memory != way.memory || known.way.mixture.lower != way.mixture.lower) continue;
      if (known.way.batch == way.batch || (!known.fits && known.way.batch < way.batch)) return known;  // nor will a larger batch
    }
    Way own = way;
    own.mixture.count = 0;
    const MemoryPlan found = plan(own);
    tried_.push_back({own, found.fits, found.of(ops::MemoryPhase::kLoss).allocated});
    return tried_.back();
  }

  /// No more blocks than this can have the richer policy; -1: not even none.
  [[nodiscard]] int64_t most_richer(const Way& way) {
    const Least& least = least_of(way);
    if (!least.fits) return -1;
    const Bytes more = kept(way, way.mixture.upper) - kept(way, way.mixture.lower);
    // The chunk of logits is not there yet while the last block runs, so a little more than this may still fit.
    return std::min(blocks_, (room_ - least.loss).count / std::max<int64_t>(1, more.count) + 2);
  }

  [[nodiscard]] Bytes kept(const Way& way, Keep keep) const {
    // Adapters keep a little more: the bound is on the safe side.
    return DecoderBlock::kept_bytes(asked_.model, way.batch * asked_.length, keep, asked_.compute_dtype,
                                    asked_.device.type == at::kCUDA);
  }

  /// The largest count of richer blocks that fits, of `most` at most. @pre none is fewer than fit.
  [[nodiscard]] bool fill(Way& way, int64_t most) {
    way.mixture.count = most;  // all of them is not the end of a scale: where nothing is computed again, its workspaces are gone
    if (fits(way)) return true;
    int64_t good = 0, bad = most;
    while (bad - good > 1) {
      way.mixture.count = good + (bad - good) / 2;
      (fits(way) ? good : bad) = way.mixture.count;
    }
    way.mixture.count = good;
    return true;
  }

  [[nodiscard]] std::vector<Mixture> mixtures() const {
    const Keep least = asked_.device.type == at::kCUDA ? Keep::kInputOnHost : Keep::kInputOnly;
    return {{least, Keep::kEverything}, {least, Keep::kAttentionOnly}, {Keep::kAttentionOnly, Keep::kEverything}};
  }

  /// Above this many tokens a larger micro-batch gains nothing on any card of the table.
  static constexpr int64_t kMostTokens = 32768;
  /// A smaller gain than this over the best choice is within the roofline's own error, and is skipped.
  static constexpr double kWorthIt = 0.99;

  const PlanSettings& asked_;
  const Gpu& rates_;
  Bytes room_;
  double length_;  ///< Average, of a row.
  int64_t blocks_, rows_ = 1;
  std::vector<int64_t> batches_;
  std::vector<Least> tried_;
};

std::string memory_text(const MemorySettings& memory) {
  std::string text;
  if (memory.embedding_on_host) text += ", embedding on the host";
  if (memory.base_on_host) text += ", base on the host";
  if (memory.loss_chunk_rows > 0) text += message(", {} rows of logits at a time", memory.loss_chunk_rows);
  if (memory.weight_workspace != WeightWorkspace::kLayer)
    text += message(", weight_workspace={}", to_string(memory.weight_workspace));
  if (memory.mlp_tile_rows > 0) text += message(", MLP in tiles of {} rows", memory.mlp_tile_rows);
  return text;
}

std::string describe(const Search& search, const Way& way) {
  return message("batch {} x {}, keeping {}{}", way.batch, search.settings_of(way).accumulation, way.mixture.text(search.blocks()),
                 memory_text(way.memory));
}

[[noreturn]] void refuse(const Search& search, const PlanSettings& asked, const BudgetRequest& request) {
  const Bytes room = request.room;
  const Way least = search.smallest();
  const MemoryPlan plan = plan_memory(search.settings_of(least));
  const Bytes need = plan.training_peak(), load = plan.of(ops::MemoryPhase::kLoad).allocated;
  if (load > room && load > need) {
    const bool gpu = asked.device.type == at::kCUDA && !asked.memory.base_on_host && asked.base_shards == 1;
    throw ValueError(
        message("[{}] {} are not enough: loading the model needs {}, more than any step. Ways out: a larger {}, {}or a checkpoint "
                "that is already in four bits.",
                request.name, to_string(room), to_string(load), request.name, gpu ? "base_on_host, " : ""));
  }
  throw ValueError(
      message("[{}] {} are not enough: the smallest step of {} x {} tokens needs at least {}{}. Ways out: {}.", request.name,
              to_string(room), least.batch, asked.length, to_string(need),
              need > room ? message(", {} more", to_string(need - room)) : std::string(", plus the allocator's overhead"),
              ways_out(search.settings_of(least), room)));
}

}  // namespace

std::string ways_out(const PlanSettings& settings, Bytes room) {
  std::string ways;
  const auto add = [&](const std::string& name, const PlanSettings& changed) {
    const MemoryPlan found = plan_memory(changed);
    ways += message("{}{}: {}{}", ways.empty() ? "" : "; ", name, to_string(found.training_peak()),
                    plan_memory(changed, room).fits ? ", fits" : "");
  };
  if (settings.batch > 1) {
    PlanSettings one = settings;
    one.batch = 1;
    add("batch 1", one);
  }
  if (settings.device.type == at::kCUDA && !settings.memory.base_on_host && settings.base_shards == 1) {
    PlanSettings on_host = settings;
    on_host.memory.base_on_host = true;
    add("base_on_host", on_host);
  }
  PlanSettings shorter = settings;
  shorter.length = std::max<int64_t>(2, settings.length / 2);
  add(message("rows of {} tokens", shorter.length), shorter);
  if (settings.lora.r > 1) {
    PlanSettings lower = settings;
    lower.lora.r = settings.lora.r / 2;
    add(message("rank {}", lower.lora.r), lower);
  }
  return ways;
}

std::string advice_for_one_row(PlanSettings settings, Bytes room) {
  settings.batch = settings.accumulation = 1;
  const Bytes need = plan_memory(settings).training_peak();
  return message(
      "One row of {} tokens needs {}; {} are available{}. Ways out: {}; or memory_budget=auto, which trades time for memory.",
      settings.length, to_string(need), to_string(room),
      need > room ? message(": {} are missing", to_string(need - room)) : std::string(", minus the allocator's fragmentation"),
      ways_out(settings, room));
}

BudgetChoice fit_budget(const PlanSettings& settings, const Gpu& rates, const BudgetRequest& request) {
  QLORAPP_CHECK_VALUE(request.room.count > 0, "[{}] must be above 0; got {} bytes.", request.name, request.room.count);
  Search search(settings, rates, request);
  const std::optional<Way> found = search.best();
  if (!found) refuse(search, settings, request);

  BudgetChoice choice;
  choice.settings = search.settings_of(*found);
  choice.plan = search.plan(*found);
  choice.keep = found->mixture.text(search.blocks());
  choice.seconds = search.seconds(*found);
  Way free = *found;  // the same micro-batch where memory were no matter
  free.memory = settings.memory;
  free.mixture = {Keep::kEverything, Keep::kEverything, search.blocks()};
  const double unlimited = search.seconds(free);
  choice.way = describe(search, *found);
  choice.text = message(
      "memory_budget {}: {}; {} in use at most, {}", to_string(request.room), choice.way, to_string(choice.plan.training_peak()),
      choice.seconds <= unlimited * 1.0005 ? std::string("nothing is computed twice")
                                           : percent(choice.seconds / unlimited - 1) + " slower than with memory for everything");
  const auto neighbor = [&](const char* word, int64_t more) {
    Way next = *found;
    next.mixture.count += more;
    if (next.mixture.count < 0 || next.mixture.count > search.blocks() || next.mixture.lower == next.mixture.upper) return;
    const Bytes need = search.need(next);
    choice.text += message("\n  {}: {}, {}, {} in time", word, describe(search, next), to_string(need),
                           percent(search.seconds(next) / choice.seconds - 1));
  };
  neighbor("next faster", 1);
  neighbor("next smaller", -1);
  return choice;
}

}  // namespace qlorapp
