// SPDX-License-Identifier: Apache-2.0
#include "split_pattern.hpp"

#include <algorithm>
#include <limits>

#include "core/check.hpp"

namespace qlorapp {
namespace {

using unicode::CodePoint;

constexpr std::size_t kStepsPerCharacter = 512;  // published patterns need fewer than ten
constexpr std::size_t kFreeSteps = std::size_t{1} << 20;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

}  // namespace

bool CharacterSet::has(uint32_t code_point, uint8_t classes) const {
  const bool is_space = (classes & unicode::kSpace) != 0;
  const bool inside =
      (space_ && is_space) || (no_space_ && !is_space) ||
      (categories_ != 0 && (categories_ >> unicode::category_of(code_point) & 1) != 0) ||
      std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& r) { return r.first <= code_point && code_point <= r.second; });
  return inside != negated_;
}

void CharacterSet::finish() {
  for (uint32_t c = 0; c < ascii_.size(); ++c) ascii_[c] = has(c, unicode::classes_of(c));
}

/// Backtracks as a regular expression does: alternatives in their order, as many repetitions as there are, then fewer.
class SplitPattern::Matcher {
 public:
  Matcher(const SplitPattern& pattern, const std::vector<CodePoint>& text, Piece range)
      : pattern_(pattern), text_(text), end_(range.end), steps_left_(kFreeSteps + kStepsPerCharacter * (range.end - range.begin)) {}

  /// @returns the end of the match of `node` and what follows it at `i`, or kNone.
  std::size_t match(int node, std::size_t i) {
    const Node& n = pattern_.nodes_[static_cast<std::size_t>(node)];
    spend(1);
    switch (n.kind) {
      case Node::Kind::kMatch:
        return i;
      case Node::Kind::kLineEnd:
        return i == end_ || text_[i].value == '\n' ? match(n.next, i) : kNone;
      case Node::Kind::kAhead:
      case Node::Kind::kNotAhead:
        return (match(n.alternatives[0], i) != kNone) == (n.kind == Node::Kind::kAhead) ? match(n.next, i) : kNone;
      case Node::Kind::kAlternatives:
        for (const int alternative : n.alternatives) {
          if (const std::size_t end = match(alternative, i); end != kNone) return end;
        }
        return kNone;
      case Node::Kind::kSet:
        return repeat(n, i);
    }
    return kNone;
  }

 private:
  std::size_t repeat(const Node& n, std::size_t i) {
    const CharacterSet& set = pattern_.sets_[static_cast<std::size_t>(n.set)];
    const std::size_t last = n.most < end_ - i ? i + n.most : end_;
    std::size_t at = i;
    while (at < last && set.contains(text_[at])) ++at;
    spend(at - i);
    const std::size_t least = i + n.least;
    for (; at >= least; --at) {
      const std::size_t end = match(n.next, at);
      if (end != kNone || n.possessive || at == 0) return end;
    }
    return kNone;
  }

  void spend(std::size_t steps) {
    QLORAPP_CHECK_VALUE(steps <= steps_left_,
                        "[tokenizer] the pattern of Split must divide a text in linear time; it needs more than {} steps for each "
                        "character. Check tokenizer.json, or split the row.",
                        kStepsPerCharacter);
    steps_left_ -= steps;
  }

  const SplitPattern& pattern_;
  const std::vector<CodePoint>& text_;
  std::size_t end_;
  std::size_t steps_left_;
};

void SplitPattern::split(const std::vector<CodePoint>& text, Piece range, bool keep_gaps, std::vector<Piece>& out) const {
  Matcher matcher(*this, text, range);
  // A run that no end of which matches has no match that begins later in the run, either: \s+$ stays linear.
  const Node& first = nodes_[static_cast<std::size_t>(start_)];
  const bool is_run = first.kind == Node::Kind::kSet && first.least == 1 && first.most == kNone;
  std::size_t gap = range.begin;
  const auto end_gap = [&](std::size_t at) {
    if (keep_gaps && gap < at) out.push_back({gap, at});
  };
  for (std::size_t i = range.begin; i < range.end;) {
    const std::size_t end = matcher.match(start_, i);
    if (end == kNone) {
      do ++i;
      while (is_run && i < range.end && sets_[static_cast<std::size_t>(first.set)].contains(text[i - 1]) &&
             sets_[static_cast<std::size_t>(first.set)].contains(text[i]));
      continue;
    }
    end_gap(i);
    out.push_back({i, end});
    i = gap = end;
  }
  end_gap(range.end);
}

void SplitPattern::look_at_words() {
  const auto holds = [&](int set, bool letters) {
    const std::string_view some = letters ? "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" : " \n";
    return std::any_of(some.begin(), some.end(), [&](char c) {
      return sets_[static_cast<std::size_t>(set)].contains({static_cast<uint32_t>(c), 0, 0});
    });
  };
  // The character sets that may follow a node's match, and whether a look-ahead may: it would see the text behind the word.
  struct Behind {
    std::vector<int> sets = {};
    bool looks_ahead = false;
  };
  const auto behind = [&](int first) {
    Behind out;
    std::vector<bool> seen(nodes_.size(), false);
    std::vector<int> open{first};
    while (!open.empty()) {
      const auto at = static_cast<std::size_t>(open.back());
      open.pop_back();
      if (seen[at]) continue;
      seen[at] = true;
      const Node& n = nodes_[at];
      if (n.kind == Node::Kind::kAlternatives) open.insert(open.end(), n.alternatives.begin(), n.alternatives.end());
      if (n.kind == Node::Kind::kSet) out.sets.push_back(n.set);
      const bool looks = n.kind == Node::Kind::kAhead || n.kind == Node::Kind::kNotAhead || n.kind == Node::Kind::kLineEnd;
      out.looks_ahead = out.looks_ahead || looks;
      if (looks || (n.kind == Node::Kind::kSet && n.least == 0)) open.push_back(n.next);
    }
    return out;
  };
  respects_word_ends_ = true;
  for (const Node& n : nodes_) {
    if (n.kind == Node::Kind::kAhead || n.kind == Node::Kind::kNotAhead) {
      const Node& seen = nodes_[static_cast<std::size_t>(n.alternatives[0])];
      const bool one =
          seen.kind == Node::Kind::kSet && seen.most == 1 && nodes_[static_cast<std::size_t>(seen.next)].kind == Node::Kind::kMatch;
      if (!one) respects_word_ends_ = false;
    }
    if (n.kind != Node::Kind::kSet || !holds(n.set, true)) continue;
    Behind after = behind(n.next);
    if (n.most > 1) after.sets.push_back(n.set);
    if (after.looks_ahead || std::any_of(after.sets.begin(), after.sets.end(), [&](int set) { return holds(set, false); }))
      respects_word_ends_ = false;
  }
  // An alternative that one letter is enough for.
  const auto takes = [&](int node) {
    bool letter = false;
    for (const Node* n = &nodes_[static_cast<std::size_t>(node)];; n = &nodes_[static_cast<std::size_t>(n->next)]) {
      if (n->kind == Node::Kind::kMatch) return letter;
      if (n->kind != Node::Kind::kSet) return false;
      if (n->least == 0) continue;
      if (letter || n->least > 1) return false;
      const CharacterSet& set = sets_[static_cast<std::size_t>(n->set)];
      for (uint32_t c = 'a'; c <= 'z'; ++c) {
        if (!set.contains({c, 0, 0}) || !set.contains({c - 'a' + 'A', 0, 0})) return false;
      }
      letter = true;
    }
  };
  const Node& first = nodes_[static_cast<std::size_t>(start_)];
  takes_letters_ = first.kind == Node::Kind::kAlternatives
                       ? std::any_of(first.alternatives.begin(), first.alternatives.end(), takes)
                       : takes(start_);
}

}  // namespace qlorapp
