// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/text/stop_strings.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/printable.hpp"

namespace qlorapp {

StopStrings::StopStrings(std::vector<std::string> strings, Decode decode)
    : strings_(std::move(strings)), matched_(strings_.size(), false), decode_(std::move(decode)) {
  for (const std::string& one : strings_) {
    QLORAPP_CHECK_VALUE(!one.empty(), "[stop_strings] a stop string must have a character; got ''. Leave it out.");
    // Each token has a byte at least, but for a few that are cut off at the left end of what is decoded.
    constexpr size_t kSpare = 8;
    window_ = std::max(window_, one.size() + kSpare);
  }
}

void StopStrings::begin(int64_t row, std::span<const TokenId> prompt) {
  const auto last = prompt.last(std::min(prompt.size(), window_));
  rows_[row] = {std::vector<TokenId>(last.begin(), last.end()), false};
}

bool StopStrings::add(int64_t row, TokenId token) {
  if (strings_.empty()) return false;
  Row& own = rows_[row];
  if (own.tail.size() > window_) own.tail.erase(own.tail.begin());
  const std::string before = decode_(own.tail);
  own.tail.push_back(token);
  const std::string now = decode_(own.tail);
  // The end of `before` may be an incomplete character that the token completes.
  const size_t same = static_cast<size_t>(std::ranges::mismatch(before, now).in2 - now.begin());
  for (size_t i = 0; i < strings_.size(); ++i) {
    const std::string& wanted = strings_[i];
    const size_t from = same >= wanted.size() ? same - wanted.size() + 1 : 0;
    if (now.find(wanted, from) == std::string::npos) continue;
    matched_[i] = true;
    own.ended = true;
  }
  return own.ended;
}

bool StopStrings::ended(int64_t row) const {
  const auto found = rows_.find(row);
  return found != rows_.end() && found->second.ended;
}

std::vector<std::string> StopStrings::unmatched() const {
  std::vector<std::string> lines;
  for (size_t i = 0; i < strings_.size(); ++i) {
    if (matched_[i] || rows_.empty()) continue;
    lines.push_back(message("stop string {} never matched in {} {}", printable(strings_[i], 60), rows_.size(),
                            rows_.size() == 1 ? "answer" : "answers"));
  }
  return lines;
}

}  // namespace qlorapp
