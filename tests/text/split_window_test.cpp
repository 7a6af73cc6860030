// SPDX-License-Identifier: Apache-2.0
// A text that is split a window at a time has the pieces that it has as a whole.
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "text/pretokenize.hpp"
#include "text/unicode.hpp"

using namespace qlorapp;

namespace {

using Ends = std::vector<std::size_t>;

/// The whole text, by one step behind the other.
Ends whole(const std::vector<SplitStep>& steps, const std::string& text) {
  const auto decoded = unicode::decode(text);
  std::vector<Piece> pieces{{0, decoded.size()}}, finer;
  for (const SplitStep& step : steps) {
    finer.clear();
    for (const Piece piece : pieces) split_pieces(step, decoded, piece, finer);
    pieces.swap(finer);
  }
  Ends ends;
  for (const Piece& piece : pieces) ends.push_back(piece.end);
  return ends;
}

/// @param size  code points of a window; doubled where it is too short.
Ends by_windows(const std::vector<SplitStep>& steps, const std::string& text, std::size_t size) {
  const auto decoded = unicode::decode(text);
  Ends ends;
  std::vector<Piece> pieces;
  std::size_t now = size;
  for (std::size_t begin = 0; begin < decoded.size();) {
    const std::size_t end = std::min(begin + now, decoded.size());
    const std::vector<unicode::CodePoint> window(decoded.begin() + static_cast<std::ptrdiff_t>(begin),
                                                 decoded.begin() + static_cast<std::ptrdiff_t>(end));
    const std::size_t done = split_window(steps, window, end == decoded.size(), pieces);
    now = done == 0 ? now * 2 : size;
    if (done == 0) continue;
    for (const Piece& piece : pieces) ends.push_back(begin + piece.end);
    begin += done;
  }
  return ends;
}

SplitStep by_pattern(const std::string& expression) {
  std::string why;
  auto pattern = SplitPattern::parse(expression, why);
  REQUIRE(why.empty());
  return {Split::kPattern, 0, pattern};
}

}  // namespace

TEST_CASE("a text has the same pieces however many windows it is split in", "[text][cpu]") {
  const std::vector<std::vector<SplitStep>> splits{
      {{Split::kLlama3}},
      {{Split::kQwen2}},
      {{Split::kGpt2}},
      {{Split::kIndividualDigits}, {Split::kGpt2}},
      {{Split::kContiguousDigits}, {Split::kGpt2}},
      {{Split::kGpt2}, {Split::kIndividualDigits}},
      {{Split::kLlama3}, {Split::kGpt2}},
      {{Split::kContiguousDigits}, {Split::kQwen2}, {Split::kAroundDelimiter, 'e'}},
      {{Split::kBeforeDelimiter, '_'}},
      {{Split::kAfterDelimiter, '_'}},
      {{Split::kAroundDelimiter, '_'}, {Split::kIndividualDigits}},
      {{Split::kBeforeRuns, '_'}},
      {},
      {by_pattern(R"(\p{N}{1,3})"), by_pattern("[\xE4\xB8\x80-\xE9\xBE\xA5]+"),
       by_pattern(R"([!-/][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)")},
      {by_pattern(R"([^\r\n\p{L}\p{N}]?\p{Lu}*\p{Ll}+(?i:'s|'ll)?|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)")},
      {by_pattern(R"(\s+$)"), by_pattern(R"(\s?\p{L}+)"), {Split::kIndividualDigits}},
      {by_pattern(R"([^\n]+|\n+)")},     // holds spaces behind words: never cut
      {by_pattern(R"(\p{L}+(?= \S))")},  // looks behind words
  };
  const std::vector<std::string> parts{"a",  "e",  "'s",     "'ll",          "'", " ",  "  ",   "\n", "\r\n",     "\t",
                                       "12", "7",  "_",      "__",           ".", "--", "漢字", "。", "\xC2\xA0", "don't",
                                       "re", "'r", "\n \n ", "\xE2\x80\xA8", "é", "½",  "word"};
  std::mt19937 random(7);
  for (std::size_t which = 0; which < splits.size(); ++which) {
    const auto& steps = splits[which];
    for (int round = 0; round < 150; ++round) {
      std::string text;
      const std::size_t few = 1 + random() % parts.size();  // texts of few kinds have long runs
      for (int i = 0; i < 80; ++i) text += parts[(random() % few + static_cast<std::size_t>(round)) % parts.size()];
      const Ends wanted = whole(steps, text);
      for (const std::size_t size : {5u, 9u, 16u, 33u}) {
        CAPTURE(which, text, size);
        REQUIRE(by_windows(steps, text, size) == wanted);
      }
    }
  }
}
