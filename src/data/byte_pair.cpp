// SPDX-License-Identifier: Apache-2.0
#include "byte_pair.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_set>

#include "qlorapp/core/check.hpp"
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
  uint32_t bytes;  ///< 0: merged into its left neighbour.
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

BytePairModel::BytePairModel(const Vocabulary& vocabulary, const Merges& merges, bool ignore_merges, const std::string& where)
    : ignore_merges_(ignore_merges) {
  single_.fill(-1);
  token_ids_.reserve(vocabulary.size());
  byte_ids_.reserve(vocabulary.size());
  std::unordered_set<int32_t> seen;
  std::string bytes;
  for (const auto& [token, id] : vocabulary) {
    QLORAPP_CHECK_FORMAT(id >= 0 && seen.insert(id).second, "[", where,
                         "] model.vocab must give each token its own id >= 0; token '", token, "' has ", id,
                         ". Take the tokenizer.json of the model again.");
    token_ids_.emplace(token, id);
    if (!bytes_of_token(token, bytes)) continue;
    byte_ids_.emplace(bytes, id);
    if (bytes.size() == 1) single_[static_cast<uint8_t>(bytes[0])] = id;
  }
  token_count_ = token_ids_.size();
  merges_.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto a = token_ids_.find(left), b = token_ids_.find(right), both = token_ids_.find(left + right);
    QLORAPP_CHECK_FORMAT(a != token_ids_.end() && b != token_ids_.end() && both != token_ids_.end(), "[", where,
                         "] model.merges must join known tokens into a known token; merge ", rank, " is '", left, "' + '", right,
                         "'. Take the tokenizer.json of the model again.");
    merges_.insert_or_assign(pair_key(a->second, b->second), Merge{static_cast<uint32_t>(rank), both->second});
  }
}

const BytePairModel::Merge* BytePairModel::find_merge(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void BytePairModel::encode(std::string_view piece, std::vector<PieceToken>& out) const {
  if (ignore_merges_) {
    if (const auto whole = byte_ids_.find(piece); whole != byte_ids_.end()) {
      out.push_back({whole->second, static_cast<uint32_t>(piece.size())});
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

void BytePairModel::merge(std::string_view piece, std::vector<PieceToken>& out) const {
  std::vector<Symbol> symbols(piece.size());
  for (std::size_t i = 0; i < piece.size(); ++i) {
    const auto byte = static_cast<uint8_t>(piece[i]);
    QLORAPP_CHECK_VALUE(single_[byte] >= 0,
                        "[tokenizer] every byte of the text must have a token; the vocabulary has none for byte ",
                        static_cast<int>(byte), ". Train the tokenizer with the full byte alphabet (ByteLevel.alphabet()).");
    symbols[i] = {single_[byte], 1, static_cast<int32_t>(i) - 1, i + 1 < piece.size() ? static_cast<int32_t>(i) + 1 : -1};
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
    // The neighbours may have changed since; as in Hugging Face's engine, what counts is that the pair still gives this token.
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
