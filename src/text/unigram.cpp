// SPDX-License-Identifier: Apache-2.0
#include "unigram.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr double kUnknownPenalty = 10;

}  // namespace

UnigramModel::UnigramModel(const Vocabulary& vocabulary, UnigramOptions options, const std::string& where)
    : options_(std::move(options)) {
  QLORAPP_CHECK_FORMAT(
      !options_.unk_id || (*options_.unk_id >= 0 && static_cast<std::size_t>(*options_.unk_id) < vocabulary.size()),
      "[{}] model.unk_id must be the id of a token, below {}; got {}. Copy tokenizer.json from the model again.", where,
      vocabulary.size(), options_.unk_id.value_or(0));
  fallback_.fill(-1);
  token_at_.push_back(-1);
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [token, id] : vocabulary) {
    QLORAPP_CHECK_FORMAT(
        !token.empty() && token_ids_.emplace(token, id).second,
        "[{}] each token of model.vocab must be there once and not empty; got '{}'. Copy tokenizer.json from the model again.",
        where, token);
    least = std::min(least, options_.scores[static_cast<std::size_t>(id)]);
    uint32_t node = 0;
    for (const char c : token) {
      const auto [child, is_new] =
          children_.emplace(uint64_t{node} << 8 | static_cast<unsigned char>(c), static_cast<uint32_t>(token_at_.size()));
      if (is_new) token_at_.push_back(-1);
      node = child->second;
    }
    token_at_[node] = id;
  }
  unknown_score_ = least - kUnknownPenalty;
  for (std::size_t byte = 0; options_.byte_fallback && byte < fallback_.size(); ++byte) {
    const auto found = token_ids_.find(message("<0x{:02X}>", byte));
    if (found != token_ids_.end()) fallback_[byte] = found->second;
  }
}

void UnigramModel::encode(std::string_view piece, std::vector<PieceToken>& out) const {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  struct End {
    std::size_t begin = std::numeric_limits<std::size_t>::max();  ///< Of the best token that ends here.
    double score = 0;                                             ///< Of the best way to here.
    int32_t id = 0;
  };
  std::vector<End> ends(piece.size() + 1);
  const auto offer = [&](std::size_t end, std::size_t begin, double score, int32_t id) {
    if (ends[end].begin == kNone || score > ends[end].score) ends[end] = {begin, score, id};
  };
  for (std::size_t begin = 0, bytes = 0; begin < piece.size(); begin += bytes) {
    bytes = unicode::length_at(piece.substr(begin));
    const double before = ends[begin].score;
    bool has_character = false;
    uint32_t node = 0;
    for (std::size_t end = begin; end < piece.size();) {
      const auto child = children_.find(uint64_t{node} << 8 | static_cast<unsigned char>(piece[end]));
      if (child == children_.end()) break;
      node = child->second;
      ++end;
      const int32_t id = token_at_[node];
      if (id < 0) continue;
      offer(end, begin, options_.scores[static_cast<std::size_t>(id)] + before, id);
      has_character = has_character || end - begin == bytes;
    }
    if (!has_character) offer(begin + bytes, begin, unknown_score_ + before, options_.unk_id.value_or(0));
  }
  std::vector<std::string_view> texts;  // from the last; unknown ones beside each other are one
  bool unknown = false;
  for (std::size_t end = piece.size(); end > 0; end = ends[end].begin) {
    const std::size_t begin = ends[end].begin;
    const bool joins = unknown;
    unknown = options_.unk_id && ends[end].id == *options_.unk_id;
    if (joins && unknown) texts.back() = piece.substr(begin, end - begin + texts.back().size());
    else texts.push_back(piece.substr(begin, end - begin));
  }
  for (auto text = texts.rbegin(); text != texts.rend(); ++text) put(*text, out);
}

void UnigramModel::put(std::string_view text, std::vector<PieceToken>& out) const {
  const auto bytes = static_cast<uint32_t>(text.size());
  if (const auto found = token_ids_.find(text); found != token_ids_.end()) return out.push_back({found->second, bytes});
  const auto token_of = [&](char c) { return fallback_[static_cast<unsigned char>(c)]; };
  if (options_.byte_fallback && std::all_of(text.begin(), text.end(), [&](char c) { return token_of(c) >= 0; })) {
    for (std::size_t i = 0; i < text.size(); ++i) out.push_back({token_of(text[i]), i == 0 ? bytes : 0});
    return;
  }
  QLORAPP_CHECK_VALUE(options_.unk_id.has_value(),
                      "[tokenizer] the tokenizer has no token for '{}', and no unknown token. Remove the text.", text);
  out.push_back({*options_.unk_id, bytes});
}

}  // namespace qlorapp
