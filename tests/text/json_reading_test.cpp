// SPDX-License-Identifier: Apache-2.0
// A row in parts is the row as a whole, or has its error.
#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "text/json_reading.hpp"

using namespace qlorapp;

namespace {

constexpr TextPlace kBegin{7, 3};

/// The row as JSON, or the error.
std::string outcome(const auto& read) try { return read().dump(); } catch (const FormatError& error) {
  return error.what();
}

/// The row of parts of 1 to `longest` bytes, in memory that is used again.
Row in_parts(const std::string& text, std::minstd_rand& random, std::size_t longest) {
  std::size_t begin = 0;
  std::string part;
  const auto next = [&]() -> std::string_view {
    part.assign(text, begin, 1 + random() % longest);
    begin += part.size();
    return part;
  };
  return parse_row(next, "file:7", true, kBegin);
}

}  // namespace

TEST_CASE("a row that is read in parts is the row that is read as a whole") {
  std::minstd_rand random(1);
  std::vector<std::string> texts = {
      R"({"text": "größer, 漢字 and \ud83d\ude00", "input_ids": [1, 22, 333], "labels": [-100, 22], "n": [1.5, -7e3, true, null]})",
      "[\n1,\n\"ü\",\n{\"a\": {}}\n]  ",
      "",
      "{",
      "\"never ends",
      "{\"a\": 1, \"a\": 2}",
      "{\"漢\": 1,\n \"字\": nul}",
      "[1] 2",
      "\"\\ud800\"",
      "[NaN]",
      std::string("[\"\0\"]", 5),
  };
  const std::string first = texts.front();
  for (std::size_t end = 0; end < first.size(); ++end) {  // characters cut in two, too
    texts.push_back(first.substr(0, end));
    std::string changed = first;
    changed[end] = static_cast<char>(random() % 256);
    texts.push_back(changed);
  }
  for (const std::string& text : texts) {
    const std::string expected = outcome([&] { return parse_row(text, "file:7", true, kBegin); });
    for (const std::size_t longest : {std::size_t{1}, std::size_t{4}, std::max<std::size_t>(1, text.size())}) {
      CHECK(outcome([&] { return in_parts(text, random, longest); }) == expected);
    }
  }
}
