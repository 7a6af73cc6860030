// SPDX-License-Identifier: Apache-2.0
#include "stored_names.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "core/check.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 6> kWrappers{"model",       "language_model", "text_model",
                                                    "transformer", "vision_model",   "backbone"};

bool is_number(std::string_view word) {
  return !word.empty() && std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::vector<std::string_view> words_of(std::string_view name) {
  std::vector<std::string_view> words;
  for (size_t begin = 0; begin <= name.size() && !name.empty();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

bool sees(const std::vector<std::string_view>& words) {
  return std::any_of(words.begin(), words.end(), [](std::string_view word) { return word.find("vis") != word.npos; });
}

/// In how many wrappers two names differ; none if they differ in more than wrappers.
std::optional<size_t> difference(std::string_view a, std::string_view b) {
  std::vector<std::string_view> left = words_of(a), right = words_of(b), differing;
  if (sees(left) != sees(right)) return std::nullopt;
  std::sort(left.begin(), left.end());
  std::sort(right.begin(), right.end());
  std::set_symmetric_difference(left.begin(), left.end(), right.begin(), right.end(), std::back_inserter(differing));
  const bool wrappers = std::all_of(differing.begin(), differing.end(), [](std::string_view word) {
    return std::find(kWrappers.begin(), kWrappers.end(), word) != kWrappers.end();
  });
  return wrappers ? std::optional(differing.size()) : std::nullopt;
}

}  // namespace

SplitName split_name(std::string_view name) {
  const std::vector<std::string_view> words = words_of(name);
  const auto number = std::find_if(words.begin(), words.end(), is_number);
  size_t first = words.size() < 2 ? 0 : words.size() - 2;
  if (number != words.end()) first = number == words.begin() ? 0 : static_cast<size_t>(number - words.begin()) - 1;
  if (first == 0) return {{}, name};
  const auto at = static_cast<size_t>(words[first].data() - name.data());
  return {name.substr(0, at - 1), name.substr(at)};
}

size_t count_numbers(std::string_view name) {
  const std::vector<std::string_view> words = words_of(name);
  return static_cast<size_t>(std::count_if(words.begin(), words.end(), is_number));
}

StoredNames::StoredNames(std::vector<std::string> names) : names_(std::move(names)) {
  std::sort(names_.begin(), names_.end());
  for (size_t i = 0; i < names_.size(); ++i) by_tail_.emplace(split_name(names_[i]).tail, i);
}

const std::string* StoredNames::find(const std::string& name) const {
  const auto same = std::lower_bound(names_.begin(), names_.end(), name);
  if (same != names_.end() && *same == name) return &*same;
  const SplitName wanted = split_name(name);
  const std::string *best = nullptr, *other = nullptr;
  size_t least = 0;
  const auto [begin, end] = by_tail_.equal_range(wanted.tail);
  for (auto at = begin; at != end; ++at) {
    const std::string& stored = names_[at->second];
    const auto apart = difference(wanted.wrappers, split_name(stored).wrappers);
    if (!apart || (best != nullptr && *apart > least)) continue;
    other = best != nullptr && *apart == least ? best : nullptr;
    best = &stored;
    least = *apart;
  }
  QLORAPP_CHECK_FORMAT(other == nullptr,
                       "[merge] '{}' of the adapter may be '{}' or '{}' of the base. Merge it in Python, with PEFT's "
                       "merge_and_unload().",
                       name, *other, *best);
  return best;
}

}  // namespace qlorapp
