// SPDX-License-Identifier: Apache-2.0
#include "added_tokens.hpp"

#include <algorithm>
#include <utility>

#include "unicode.hpp"

namespace qlorapp {
namespace {

using unicode::last_code_point;
using unicode::length_at;

bool is(uint32_t code_point, uint8_t classes) { return (unicode::classes_of(code_point) & classes) != 0; }

bool ends_with(std::string_view text, uint8_t classes) {
  if (text.empty()) return false;
  return is(unicode::decode(text.substr(last_code_point(text))).front().value, classes);
}

bool starts_with(std::string_view text, uint8_t classes) {
  if (text.empty()) return false;
  return is(unicode::decode(text.substr(0, length_at(text))).front().value, classes);
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), token_at_{-1} {
  for (std::size_t t = 0; t < tokens_.size(); ++t) {
    uint32_t node = 0;
    for (const char c : tokens_[t].content) {
      const uint64_t key = (static_cast<uint64_t>(node) << 8) | static_cast<uint8_t>(c);
      const auto [edge, added] = edges_.try_emplace(key, static_cast<uint32_t>(token_at_.size()));
      if (added) token_at_.push_back(-1);
      node = edge->second;
    }
    token_at_[node] = static_cast<int32_t>(t);
    first_byte_[static_cast<uint8_t>(tokens_[t].content.front())] = true;
  }
}

const AddedToken* AddedTokenFinder::longest_at(std::string_view text) const {
  const AddedToken* longest = nullptr;
  uint32_t node = 0;
  for (const char c : text) {
    const auto edge = edges_.find((static_cast<uint64_t>(node) << 8) | static_cast<uint8_t>(c));
    if (edge == edges_.end()) break;
    node = edge->second;
    if (token_at_[node] >= 0) longest = &tokens_[static_cast<std::size_t>(token_at_[node])];
  }
  return longest;
}

void AddedTokenFinder::find(std::string_view text, std::size_t begin, std::size_t end, bool splits_special, std::size_t most,
                            std::vector<Stretch>& out) const {
  const std::string_view whole = text.substr(begin, end - begin);
  std::size_t emitted = 0;  // everything before has been appended
  for (std::size_t i = 0; i < whole.size();) {
    const AddedToken* token = first_byte_[static_cast<uint8_t>(whole[i])] ? longest_at(whole.substr(i)) : nullptr;
    if (token == nullptr) {
      ++i;
      continue;
    }
    std::size_t from = i, to = i + token->content.size();
    i = to;
    if (token->special && splits_special) continue;
    if (token->single_word && (ends_with(whole.substr(0, from), unicode::kWord) || starts_with(whole.substr(to), unicode::kWord))) {
      continue;
    }
    if (token->lstrip) {
      while (from > emitted && ends_with(whole.substr(0, from), unicode::kSpace)) from = last_code_point(whole.substr(0, from));
      from = std::max(from, emitted);
    }
    if (token->rstrip) {
      while (starts_with(whole.substr(to), unicode::kSpace)) to += length_at(whole.substr(to));
    }
    if (emitted < from) out.push_back({begin + emitted, begin + from, -1});
    out.push_back({begin + from, begin + to, token->id});
    emitted = to;
    if (out.size() >= most) return;
  }
  if (emitted != whole.size()) out.push_back({begin + emitted, end, -1});
}

}  // namespace qlorapp
