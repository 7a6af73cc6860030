// SPDX-License-Identifier: Apache-2.0
#include "aligned_text.hpp"

#include <utility>

#include "core/check.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr std::size_t kLongest = std::size_t{1} << 30;
constexpr std::size_t kGrowth = 16;  // published normalizers make a text at most three times as long

}  // namespace

AlignedText::AlignedText(const Section& section) : text_(section.text), given_(section.text.size()) {
  if (section.origins != nullptr) {
    origins_.assign(section.origins, section.origins + section.text.size());
    return;
  }
  origins_.resize(text_.size());
  for (std::size_t i = 0; i < text_.size(); ++i) {
    const auto at = static_cast<uint32_t>(section.begin + i);
    origins_[i] = {at, at + 1};
  }
}

void AlignedText::require_length(std::size_t length) const {
  QLORAPP_CHECK_VALUE(length < kLongest && length <= kGrowth * (given_ + 256),
                      "[tokenizer] a normalized text must be shorter than 1 GiB and at most 16 times as long as the text; got {} "
                      "bytes from {}. Split the text into several rows, or check tokenizer.json.",
                      length, given_);
}

void AlignedText::prepend(std::string_view prefix) {
  if (text_.empty()) return;
  require_length(text_.size() + prefix.size());
  const TextRange first = section().range(0, unicode::length_at(text_));
  text_.insert(0, prefix);
  origins_.insert(origins_.begin(), prefix.size(), {static_cast<uint32_t>(first.begin), static_cast<uint32_t>(first.end)});
}

void AlignedText::replace(std::string_view pattern, std::string_view content) {
  std::size_t found = text_.find(pattern);
  if (found == std::string::npos) return;
  std::string text;
  std::vector<Origin> origins;
  text.reserve(text_.size() + text_.size() / 2);
  origins.reserve(text_.size() + text_.size() / 2);
  const auto keep = [&](std::size_t from, std::size_t to) {
    text.append(text_, from, to - from);
    origins.insert(origins.end(), origins_.begin() + static_cast<std::ptrdiff_t>(from),
                   origins_.begin() + static_cast<std::ptrdiff_t>(to));
  };
  std::size_t done = 0;
  for (; found != std::string::npos; found = text_.find(pattern, done)) {
    keep(done, found);
    done = found + pattern.size();
    const std::size_t last = found + unicode::last_code_point(pattern);
    text += content;
    origins.insert(origins.end(), content.size(), {origins_[last].begin, origins_[done - 1].end});
    require_length(text.size());
  }
  keep(done, text_.size());
  assign(std::move(text), std::move(origins));
}

void AlignedText::assign(std::string content, std::vector<Origin> origins) {
  require_length(content.size());
  text_ = std::move(content);
  origins_ = std::move(origins);
}

}  // namespace qlorapp
