// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/text/stop_strings.hpp"

#include <string>
#include <vector>

#include "catch.hpp"
#include "qlorapp/core/error.hpp"

using namespace qlorapp;

namespace {

/// Token i is the i-th of these texts; those of a character's bytes give U+FFFD until it is whole.
const std::vector<std::string> kTokens{"st",   "op", "stop", "opera",  "sto",  "pper", "las",     "topper", "s", "to",
                                       "pped", "at", "tion", "xstopy", "\xC3", "\xA9", "<|end|>", "a",      ""};

std::string decode(std::span<const TokenId> ids) {
  std::string text;
  for (const TokenId id : ids) text += kTokens[static_cast<size_t>(id)];
  if (text.ends_with("\xC3")) text.replace(text.size() - 1, 1, "\xEF\xBF\xBD");
  return text;
}

TokenId id_of(const std::string& text) {
  for (size_t i = 0; i < kTokens.size(); ++i) {
    if (kTokens[i] == text) return static_cast<TokenId>(i);
  }
  throw ValueError(text);
}

/// After which of the tokens the row ends; 0: none.
size_t end_of(const std::string& wanted, const std::vector<std::string>& tokens, const std::vector<std::string>& prompt = {}) {
  StopStrings stops({wanted}, decode);
  std::vector<TokenId> begin;
  for (const std::string& one : prompt) begin.push_back(id_of(one));
  stops.begin(0, begin);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (stops.add(0, id_of(tokens[i]))) return i + 1;
  }
  return 0;
}

}  // namespace

TEST_CASE("a stop string ends a row wherever tokens cut it, and the token may go on behind it", "[text]") {
  // The examples of transformers' StopStringCriteria.
  for (const auto& tokens : std::vector<std::vector<std::string>>{
           {"st", "op"}, {"stop"}, {"st", "opera"}, {"sto", "pper"}, {"las", "topper"}, {"s", "to", "pped"}, {"xstopy"}}) {
    INFO(tokens.front());
    CHECK(end_of("stop", tokens) == tokens.size());
  }
  CHECK(end_of("stop", {"at", "tion", "st", "at", "sto", "tion"}) == 0);
  CHECK(end_of("a", {"st", "a", "a"}) == 2);
}

TEST_CASE("a stop string that the prompt holds ends no row, but it may begin there", "[text]") {
  CHECK(end_of("stop", {"at", "tion"}, {"stop"}) == 0);
  CHECK(end_of("stop", {"at", "tion"}, {"st", "op"}) == 0);
  CHECK(end_of("stop", {"op", "tion"}, {"st"}) == 1);
  std::vector<std::string> far(200, "at");
  far.insert(far.begin(), "st");
  CHECK(end_of("stop", far, {"stop"}) == 0);
  far.emplace_back("st");
  far.emplace_back("op");
  CHECK(end_of("stop", far) == far.size());
}

TEST_CASE("a stop string of special tokens and of characters in several tokens is found", "[text]") {
  CHECK(end_of("<|end|>", {"at", "<|end|>"}) == 2);
  CHECK(end_of("a\xC3\xA9s", {"a", "\xC3", "\xA9", "st"}) == 4);
  CHECK(end_of("\xC3\xA9", {"", "\xC3", "\xA9"}) == 3);
}

TEST_CASE("what never matched is named with the number of answers", "[text]") {
  StopStrings stops({"stop", "zz", "l'at"}, decode);
  CHECK(stops.unmatched().empty());
  for (int64_t row = 0; row < 3; ++row) {
    stops.begin(row, {});
    CHECK(stops.add(row, id_of("stop")));
    CHECK(stops.ended(row));
  }
  CHECK_FALSE(stops.ended(3));
  const std::vector<std::string> lines = stops.unmatched();
  REQUIRE(lines.size() == 2);
  CHECK(lines[0] == "stop string 'zz' never matched in 3 answers");
}

TEST_CASE("an empty stop string is refused", "[text]") {
  REQUIRE_THROWS_WITH(StopStrings({"a", ""}, decode), Catch::Matchers::ContainsSubstring("[stop_strings]"));
}
