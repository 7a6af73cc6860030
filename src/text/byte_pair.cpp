// SPDX-License-Identifier: Apache-2.0
#include "byte_pair.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_set>
#include <utility>

#include "core/check.hpp"
#include "token_decoder.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr std::size_t kRememberedPieces = 1 << 16;
constexpr std::size_t kRememberedLength = 64;

/// Printable Latin-1 stands for itself; the other 68 bytes are U+0100, U+0101, … in order (GPT-2, encoder.py).
struct Alphabet {
  std::array<uint16_t, 256> code_point{};
  std::array<int16_t, 0x180> byte{};

  Alphabet() {
    byte.fill(-1);
    uint16_t next = 0x100;
    for (uint16_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      code_point[b] = printable ? b : next++;
      byte[code_point[b]] = static_cast<int16_t>(b);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet instance;
  return instance;
}

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

/// A merge that may still be possible. Ordered so that the lowest rank, then the leftmost, comes first.
struct Candidate {
  uint32_t rank;
  uint32_t position;
  int32_t id;
  bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : position > other.position; }
};

struct Symbol {
  int32_t id;
  uint32_t bytes;  ///< 0: merged into its left neighbor.
  int32_t previous, next;
};

}  // namespace

bool bytes_of_token(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (const auto& c : unicode::decode(token)) {
    const int16_t byte = c.value < alphabet().byte.size() ? alphabet().byte[c.value] : int16_t{-1};
    if (byte < 0) return false;
    bytes += static_cast<char>(static_cast<uint8_t>(byte));
  }
  return true;
}

std::string token_of_bytes(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) unicode::append_utf8(out, alphabet().code_point[static_cast<uint8_t>(c)]);
  return out;
}

BytePairModel::BytePairModel(const Vocabulary& vocabulary, const Merges& merges, BytePairOptions options, const std::string& where)
    : options_(std::move(options)) {
  single_.fill(-1);
  fallback_.fill(-1);
  token_ids_.reserve(vocabulary.size());
  if (options_.byte_level) byte_ids_.reserve(vocabulary.size());
  std::unordered_set<int32_t> seen;
  std::string bytes;
  for (const auto& [token, id] : vocabulary) {
    QLORAPP_CHECK_FORMAT(
        id >= 0 && seen.insert(id).second,
        "[{}] model.vocab must give each token its own id >= 0; token '{}' has {}. Copy tokenizer.json from the model again.",
        where, token, id);
    token_ids_.emplace(token, id);
    if (options_.byte_level) {
      if (!bytes_of_token(token, bytes)) continue;
      byte_ids_.emplace(bytes, id);
    } else {
      bytes = token;
    }
    if (bytes.size() == 1) single_[static_cast<uint8_t>(bytes[0])] = id;
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = token_ids_.find(TokenDecoder::token_of(static_cast<uint8_t>(byte)));
    if (found != token_ids_.end()) fallback_[static_cast<std::size_t>(byte)] = found->second;
  }
  // A byte-level model with a token for every byte never asks for the unknown one, and published files name odd ones.
  const bool complete = options_.byte_level && std::find(single_.begin(), single_.end(), -1) == single_.end();
  if (options_.unk_token && !complete) {
    const auto unk = token_ids_.find(*options_.unk_token);
    QLORAPP_CHECK_FORMAT(unk != token_ids_.end(),
                         "[{}] model.unk_token must be a token of model.vocab; got '{}'. Copy tokenizer.json from the model again.",
                         where, *options_.unk_token);
    unk_ = unk->second;
  }
  read_merges(merges, where);
}

void BytePairModel::read_merges(const Merges& merges, const std::string& where) {
  merges_.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto a = token_ids_.find(left), b = token_ids_.find(right), both = token_ids_.find(left + right);
    QLORAPP_CHECK_FORMAT(a != token_ids_.end() && b != token_ids_.end() && both != token_ids_.end(),
                         "[{}] model.merges must join known tokens into a known token; merge {} is '{}' + '{}'. Copy "
                         "tokenizer.json from the model again.",
                         where, rank, left, right);
    merges_.insert_or_assign(pair_key(a->second, b->second), Merge{static_cast<uint32_t>(rank), both->second});
    if (left.empty() || right.empty()) continue;
    const std::string_view first = std::string_view(right).substr(0, unicode::length_at(right));
    if (std::string_view(left).substr(unicode::last_code_point(left)) != first) joined_.emplace(first);
  }
}

bool BytePairModel::may_cut_before(std::string_view character) const {
  return !options_.byte_level && !options_.ignore_merges && id_of(character) >= 0 && !joined_.contains(character) &&
         !(options_.unk_token && options_.unk_token->ends_with(character));
}

int32_t BytePairModel::id_of(std::string_view text) const {
  if (text.size() == 1) return single_[static_cast<uint8_t>(text[0])];
  const auto& known = options_.byte_level ? byte_ids_ : token_ids_;
  const auto found = known.find(text);
  return found == known.end() ? -1 : found->second;
}

const BytePairModel::Merge* BytePairModel::find_merge(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void BytePairModel::encode(std::string_view piece, std::vector<PieceToken>& out) const {
  if (options_.ignore_merges) {
    if (const int32_t whole = id_of(piece); whole >= 0) {
      out.push_back({whole, static_cast<uint32_t>(piece.size())});
      return;
    }
  }
  if (piece.size() > kRememberedLength) return merge(piece, out);
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = remembered_.find(piece); known != remembered_.end()) {
      out.insert(out.end(), known->second.begin(), known->second.end());
      return;
    }
  }
  const std::size_t before = out.size();
  merge(piece, out);
  const std::lock_guard lock(mutex_);
  if (remembered_.size() >= kRememberedPieces) remembered_.clear();
  remembered_.try_emplace(std::string(piece), out.begin() + static_cast<std::ptrdiff_t>(before), out.end());
}

bool BytePairModel::fall_back(std::string_view character, std::vector<PieceToken>& out) const {
  const auto token = [&](char c) { return fallback_[static_cast<uint8_t>(c)]; };
  if (std::any_of(character.begin(), character.end(), [&](char c) { return token(c) < 0; })) return false;
  for (const char c : character) out.push_back({token(c), 1});
  return true;
}

void BytePairModel::first_tokens(std::string_view piece, std::vector<PieceToken>& out) const {
  uint32_t unknown = 0;  // bytes of the unknown token that is still open
  const auto end_unknown = [&] {
    if (unknown != 0) out.push_back({unk_, unknown});
    unknown = 0;
  };
  for (std::size_t i = 0; i < piece.size();) {
    const std::size_t length = options_.byte_level ? 1 : unicode::length_at(piece.substr(i));
    const std::string_view unit = piece.substr(i, length);
    i += length;
    if (const int32_t id = id_of(unit); id >= 0) {
      end_unknown();
      out.push_back({id, static_cast<uint32_t>(length)});
      continue;
    }
    // An open unknown token stays open across bytes and then stands behind them: so does Hugging Face's engine.
    if (options_.byte_fallback && fall_back(unit, out)) continue;
    QLORAPP_CHECK_VALUE(unk_ >= 0 || !options_.byte_level,
                        "[tokenizer] every byte of the text must have a token; the vocabulary has none for byte {}. Train the "
                        "tokenizer with the full byte alphabet (ByteLevel.alphabet()).",
                        static_cast<int>(static_cast<uint8_t>(unit[0])));
    QLORAPP_CHECK_VALUE(unk_ >= 0,
                        "[tokenizer] every character of the text must have a token; the vocabulary has no token for '{}', no "
                        "tokens for its bytes and no unknown token. Train the tokenizer with unk_token or byte_fallback.",
                        unit);
    if (!options_.fuse_unk) end_unknown();
    unknown += static_cast<uint32_t>(length);
  }
  end_unknown();
}

void BytePairModel::merge(std::string_view piece, std::vector<PieceToken>& out) const {
  std::vector<PieceToken> first;
  first.reserve(piece.size());
  first_tokens(piece, first);
  std::vector<Symbol> symbols(first.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    symbols[i] = {first[i].id, first[i].bytes, static_cast<int32_t>(i) - 1,
                  i + 1 < first.size() ? static_cast<int32_t>(i) + 1 : -1};
  }

  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto consider = [&](int32_t left) {
    if (left < 0) return;
    const Symbol& symbol = symbols[static_cast<std::size_t>(left)];
    if (symbol.next < 0) return;
    if (const Merge* found = find_merge(symbol.id, symbols[static_cast<std::size_t>(symbol.next)].id)) {
      queue.push({found->rank, static_cast<uint32_t>(left), found->id});
    }
  };
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) consider(static_cast<int32_t>(i));

  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    if (left.bytes == 0 || left.next < 0) continue;
    Symbol& right = symbols[static_cast<std::size_t>(left.next)];
    // The neighbors may have changed since; as in Hugging Face's engine, the pair must still give this token.
    const Merge* now = find_merge(left.id, right.id);
    if (now == nullptr || now->id != top.id) continue;
    left.id = top.id;
    left.bytes += right.bytes;
    left.next = right.next;
    right.bytes = 0;
    if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = static_cast<int32_t>(top.position);
    consider(left.previous);
    consider(static_cast<int32_t>(top.position));
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.bytes != 0) out.push_back({symbol.id, symbol.bytes});
  }
}

}  // namespace qlorapp
