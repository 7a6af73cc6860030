// SPDX-License-Identifier: Apache-2.0
#include "nn/seating.hpp"

#include <algorithm>
#include <utility>

namespace qlorapp {
namespace {

/// A shorter common beginning is computed again: a second pass takes longer.
constexpr int64_t kLeastShared = 32;

/// Tokens that both begin with, in whole units. The last of a prompt is not among them: its logits are wanted.
int64_t common_beginning(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const auto differ = std::ranges::mismatch(a, b).in1;
  return std::min(differ - a.begin(), std::ssize(a) - 1) / kSharedUnit * kSharedUnit;
}

/// Whether a row that begins with so many tokens of another is seated whole: those are few, or the next row begins with many more of this one's.
bool leads(const Seating::Prompts& prompts, size_t row, int64_t shared) {
  if (shared < std::max(kLeastShared, std::ssize(prompts[row]) / 2)) return true;
  return row + 1 < prompts.size() && common_beginning(prompts[row + 1], prompts[row]) >= shared + kLeastShared;
}

}  // namespace

Seating::Beginning Seating::beginning_of(size_t row) {
  std::erase_if(leaders_, [&](const auto& one) { return !one->stem && !is_seated(*one); });
  Beginning best;
  for (const std::shared_ptr<Leader>& leader : leaders_) {
    const int64_t found = common_beginning(prompts_[row], prompts_[leader->row]);
    const int64_t shared = is_seated(*leader) ? found : std::min(found, leader->stem->count());
    if (shared > best.shared) best = {leader, shared};
  }
  return leads(prompts_, row, best.shared) ? Beginning() : best;
}

std::optional<Seating::Placed> Seating::enter(size_t row, int64_t room, Beginning beginning) {
  std::shared_ptr<SlotRange> slots = arena_.take(room - beginning.shared);
  if (!slots) {  // stems that no row holds are kept while there is room
    std::erase_if(leaders_, [&](const auto& one) { return one != beginning.leader && one->stem.use_count() == 1; });
    slots = arena_.take(room - beginning.shared);
  }
  if (!slots && taken_ == 0) {
    forget();
    beginning = {};
    slots = arena_.take(room);
  }
  if (!slots) return std::nullopt;
  const auto free = std::ranges::find_if(seats_, [](const Seat& one) { return !one.row; });
  Placed placed{.seat = free - seats_.begin(), .place = {.start = slots->first() - beginning.shared}};
  free->row = row;
  free->slots = std::move(slots);
  if (beginning.leader) {
    free->stem = stem_of(*beginning.leader, beginning.shared);
    placed.place.shared_start = free->stem->first(), placed.place.shared = beginning.shared;
  } else {
    leaders_.push_back(std::make_shared<Leader>(Leader{.row = row, .seat = placed.seat}));
  }
  ++taken_;
  return placed;
}

void Seating::leave(int64_t seat) {
  seats_[static_cast<size_t>(seat)] = {};
  --taken_;
}

/// Its first slots, so many at least, as a range that others hold, too.
std::shared_ptr<SlotRange> Seating::stem_of(Leader& leader, int64_t count) {
  if (!is_seated(leader)) return leader.stem;
  Seat& own = seats_[static_cast<size_t>(leader.seat)];
  if (!leader.stem) own.stem = leader.stem = own.slots->cut(count);
  if (leader.stem->count() < count) leader.stem->grow(*own.slots, count - leader.stem->count());
  return leader.stem;
}

std::vector<int64_t> shared_beginnings(const Seating::Prompts& prompts, const std::vector<int>& kinds, int64_t seats) {
  std::vector<int64_t> found;
  std::vector<size_t> leaders;
  for (size_t row = 0; row < prompts.size(); ++row) {
    int64_t shared = 0;
    const size_t first = leaders.size() - std::min(leaders.size(), static_cast<size_t>(seats));
    for (size_t i = first; i < leaders.size() && kinds[row] >= 0; ++i) {
      if (kinds[row] == kinds[leaders[i]]) shared = std::max(shared, common_beginning(prompts[row], prompts[leaders[i]]));
    }
    if (leads(prompts, row, shared)) shared = 0, leaders.push_back(row);
    found.push_back(shared);
  }
  return found;
}

}  // namespace qlorapp
