// SPDX-License-Identifier: Apache-2.0
/// Which rows of a generation are computed now, and where their keys and values are: a row that begins as another does has the other's first
/// slots, and some of its own behind them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "nn/slot_arena.hpp"

namespace qlorapp {

/// Where a row's keys and values are: position p in slot start + p, or, of the first `shared`, which other rows may have, too, in slot
/// shared_start + p. `start` may then be below zero.
struct RowPlace {
  int64_t start = 0, shared_start = 0, shared = 0;
};

/// Shared tokens are a multiple of it: attention on a GPU takes so many keys from one place.
inline constexpr int64_t kSharedUnit = 16;

class Seating {
 public:
  using Prompts = std::vector<std::vector<int64_t>>;

  /// A row that was seated whole: others may begin with its slots.
  struct Leader {
    size_t row = 0;
    int64_t seat = 0;
    std::shared_ptr<SlotRange> stem = {};  ///< What others begin with; it stays when the row has left.
  };
  struct Beginning {
    std::shared_ptr<Leader> leader;
    int64_t shared = 0;  ///< Tokens.
  };
  /// @param prompts  outlive this.
  Seating(const Prompts& prompts, int64_t seats, int64_t slots)
      : prompts_(prompts), arena_(slots), seats_(static_cast<size_t>(seats)) {}

  [[nodiscard]] const std::optional<size_t>& row(int64_t seat) const { return seats_[static_cast<size_t>(seat)].row; }
  [[nodiscard]] int64_t taken() const { return taken_; }
  [[nodiscard]] int64_t free() const { return static_cast<int64_t>(seats_.size()) - taken_; }

  /// The most that a row can have of one that is there; nothing where it is little.
  [[nodiscard]] Beginning beginning_of(size_t row);

  struct Placed {
    int64_t seat = 0;
    RowPlace place;
  };
  /// @param row  that was not here before.  @param room  its positions.  @param beginning  as beginning_of() had it; where only a whole row finds
  /// room, it is dropped.
  /// @returns nothing if no slots are free, which is not so where no seat is taken and `room` slots exist. At least one seat is free.
  [[nodiscard]] std::optional<Placed> enter(size_t row, int64_t room, Beginning beginning);
  void leave(int64_t seat);
  /// No row may begin with what those that are there have.
  void forget() { leaders_.clear(); }

 private:
  struct Seat {
    std::optional<size_t> row;
    std::shared_ptr<SlotRange> stem, slots;  ///< What others begin with, too, and its own.
  };

  [[nodiscard]] bool is_seated(const Leader& leader) const { return row(leader.seat) == leader.row; }
  [[nodiscard]] std::shared_ptr<SlotRange> stem_of(Leader& leader, int64_t count);

  const Prompts& prompts_;
  SlotArena arena_;
  std::vector<Seat> seats_;
  std::vector<std::shared_ptr<Leader>> leaders_;  ///< In the order of their rows.
  int64_t taken_ = 0;
};

/// Tokens that each row shares if no row has left when it enters.
/// @param kinds  rows of different kinds share nothing, nor do rows of a kind below zero.  @param seats  rows that may be there together.
[[nodiscard]] std::vector<int64_t> shared_beginnings(const Seating::Prompts& prompts, const std::vector<int>& kinds, int64_t seats);

}  // namespace qlorapp
