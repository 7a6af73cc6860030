// SPDX-License-Identifier: Apache-2.0
#include "core/escaped.hpp"

#include <string>
#include <vector>

#include "catch.hpp"
#include "qlorapp/core/log.hpp"

using namespace qlorapp;

TEST_CASE("a control character of any kind is written as its number, other text stays", "[core][cpu]") {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"plain, tab\tand UTF-8: Größe 漢字 🙂", "plain, tab\tand UTF-8: Größe 漢字 🙂"},
      {"\x1b[2J\x1b]0;title\a", "\\x1b[2J\\x1b]0;title\\x07"},
      {"over\rwritten\b\x7f", "over\\x0dwritten\\x08\\x7f"},
      {"C1: \xc2\x9b"
       "31m \xc2\x80 and no-break\xc2\xa0space",
       "C1: \\x9b31m \\x80 and no-break\xc2\xa0space"},
      {"\xe2\x80\xae"
       "gpj \xe2\x81\xa6\xe2\x80\xa8",
       "\\u202egpj \\u2066\\u2028"},
      {std::string("NUL\0", 4), "NUL\\x00"},
      {"\xff\x9b and \xc3", "\\xff\\x9b and \\xc3"},
      {"overlong \xc0\x9b \xe0\x82\x9b, surrogate \xed\xa0\x80", "overlong \\xc0\\x9b \\xe0\\x82\\x9b, surrogate \\xed\\xa0\\x80"},
      {"beyond \xf4\x90\x80\x80", "beyond \\xf4\\x90\\x80\\x80"},
  };
  for (const auto& [given, wanted] : cases) {
    CHECK(escaped(given) == wanted);
    CHECK(escaped_line(given) == wanted);
  }
  CHECK(escaped("two\nlines") == "two\nlines");
  CHECK(escaped_line("two\nlines") == "two\\nlines");
}

TEST_CASE("a sink receives no control character, and a warning on one line", "[core][cpu]") {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  log_info("row «a\nb\x1b[0m»");
  log_warning("keys [a\nerror: forged\x1b]");
  set_log_sink({});
  CHECK(lines == std::vector<std::string>{"row «a\nb\\x1b[0m»", "keys [a\\nerror: forged\\x1b]"});
}
