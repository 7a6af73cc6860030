// SPDX-License-Identifier: Apache-2.0
#include "core/nearest_name.hpp"

#include <algorithm>
#include <cctype>
#include <vector>

namespace qlorapp {
namespace {

std::string folded(std::string_view name) {
  std::string out(name);
  for (char& c : out) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

/// Levenshtein distance with transpositions of neighbors (the commonest typing mistake) at cost one.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) current[j] = std::min(current[j], before[j - 2] + 1);
    }
    before = previous;
    previous = current;
  }
  return previous[b.size()];
}

}  // namespace

std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known, std::optional<size_t> most) {
  const std::string wanted = folded(name);
  std::string_view best;
  size_t best_distance = most.value_or(wanted.size() / 3 + 1) + 1;
  for (const std::string_view candidate : known) {
    const size_t distance = edit_distance(wanted, folded(candidate));
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view name, std::span<const std::string_view> known, std::optional<size_t> most) {
  const std::string_view best = nearest_name(name, known, most);
  return best.empty() ? std::string() : " Did you mean '" + std::string(best) + "'?";
}

}  // namespace qlorapp
