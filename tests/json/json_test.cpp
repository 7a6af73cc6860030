// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/json/json.hpp"

#include <chrono>
#include <cmath>
#include <string>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "core/check.hpp"
#include "core/printable.hpp"
#include "format/expect_error.hpp"
#include "json/python_json.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

std::string json_refusal(std::string_view text, const JsonLimits& limits = {}) {
  return thrown<FormatError>([&] { (void)parse_json(text, "file.json", limits); });
}

}  // namespace

TEST_CASE("what JSON readers disagree on is refused with the file's name and the byte", "[json][cpu]") {
  const struct {
    std::string text, reason;
  } rows[] = {
      {R"({"a": 1, "a": 2})", "'a' twice, at byte 12"},
      {R"([{"b": {"c": 1, "\u0063": 2}}])", "'c' twice"},
      {"{\"a\": 1}\0{}", "NUL byte"},
      {"\xef\xbb\xbf{}", "byte-order mark"},
      {"{\"a\": \"\xff\"}", "invalid JSON"},
      {"{\"a\": \"\xc0\xaf\"}", "invalid JSON"},
      {"{\"a\": \"\xed\xa0\x80\"}", "invalid JSON"},
      {R"({"a": "\ud800"})", "surrogate"},
      {"{} {}", "invalid JSON"},
      {"[1,]", "at byte 4"},
      {"", "invalid JSON"},
      {"// c\n{}", "invalid JSON"},
      {"[NaN]", "invalid JSON"},
      {"[Infinity]", "invalid JSON"},
      {"[1e999]", "number overflow"},
      {"[9223372036854775808]", "64-bit integer"},
      {"[-9223372036854775809]", "64-bit integer"},
      {"[123456789012345678901234567890]", "64-bit integer"},
      {std::string(65, '[') + std::string(65, ']'), "nested at most 64 deep"},
      {std::string(100'000, '['), "nested at most 64 deep"},
  };
  for (const auto& row : rows) {
    std::string text = row.text;
    if (row.reason == "NUL byte") text = std::string("{\"a\": 1}\0{}", 11);
    INFO(text.substr(0, 60));
    REQUIRE(has(json_refusal(text), row.reason));
    REQUIRE(has(json_refusal(text), "[file.json]"));
    REQUIRE(has(json_refusal(text), "byte"));
  }
  REQUIRE(has(json_refusal("[1, 2]", {.max_bytes = 5}), "5 bytes; got 6"));
  REQUIRE(json_refusal(std::string(64, '[') + std::string(64, ']')) == "nothing");
}

TEST_CASE("a hostile key can neither forge a line of the error nor fill the screen", "[json][cpu]") {
  const std::string key = "x\\n[other] fine\\u001b[2J" + std::string(5000, 'y');
  const std::string message = json_refusal("{\"" + key + "\": 1, \"" + key + "\": 2}");
  REQUIRE(message.find('\n') == std::string::npos);
  REQUIRE(message.find('\x1b') == std::string::npos);
  REQUIRE(message.size() < 400);
  REQUIRE(json_refusal("[\"" + std::string(100'000, 'z') + "\x01\"]").size() < 500);
  REQUIRE(printable("a'\xff") == "'a'\\xff'");
}

TEST_CASE("values, order of keys and the extremes of int64 survive reading", "[json][cpu]") {
  const Json json = parse_json(
      " {\"z\": [1, -2.5, true, null, \"\\u00e9\\ud83d\\ude00\"], \"a\": {\"x\": 9223372036854775807, \"y\": "
      "-9223372036854775808}} ",
      "f");
  REQUIRE(json.dump() ==
          "{\"z\":[1,-2.5,true,null,\"\xc3\xa9\xf0\x9f\x98\x80\"],\"a\":{\"x\":9223372036854775807,\"y\":-9223372036854775808}}");
  REQUIRE(parse_json("[18446744073709551615]", "f", {.allow_big_integers = true})[0].get<uint64_t>() == 18446744073709551615U);
  REQUIRE(parse_json("[18446744073709551616]", "f", {.allow_big_integers = true})[0].get<double>() == 18446744073709551616.0);
}

TEST_CASE("Python's NaN and Infinity are read where they are allowed and nowhere inside a string", "[json][cpu]") {
  const JsonLimits allow{.allow_nonfinite = true};
  const Json json = parse_json(R"({"a": NaN, "NaN": [Infinity, 1.5, -Infinity, "NaN \" Infinity", 0.0], "b":NaN})", "f", allow);
  REQUIRE(std::isnan(json["a"].get<double>()));
  REQUIRE(json["NaN"][0].get<double>() == HUGE_VAL);
  REQUIRE(json["NaN"][1].get<double>() == 1.5);
  REQUIRE(json["NaN"][2].get<double>() == -HUGE_VAL);
  REQUIRE(json["NaN"][3].get<std::string>() == "NaN \" Infinity");
  REQUIRE(json["NaN"][4].get<double>() == 0.0);
  REQUIRE(std::isnan(json["b"].get<double>()));
  REQUIRE(std::isnan(parse_json("NaN", "f", allow).get<double>()));
  for (const char* text : {"[NaN1]", "[1NaN]", "[NaN.0]", "[-NaN]", "[+Infinity]", "[Infinityx]", "[--Infinity]"}) {
    INFO(text);
    REQUIRE(has(json_refusal(text, allow), "invalid JSON"));
  }
}

TEST_CASE("an object of a hundred thousand keys is read in well under a second", "[json][cpu]") {
  std::string text = "{";
  for (int i = 0; i < 100'000; ++i) text += message("{}{}\":0", i == 0 ? "\"k" : ",\"k", i);
  const auto start = std::chrono::steady_clock::now();
  REQUIRE(parse_json(text + "}", "f").size() == 100'000);
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

TEST_CASE("floats are written as Python's repr", "[json][cpu]") {
  const struct {
    double value;
    const char* repr;
  } rows[] = {{0.0, "0.0"},
              {-0.0, "-0.0"},
              {1.0, "1.0"},
              {0.05, "0.05"},
              {1e-4, "0.0001"},
              {1e-5, "1e-05"},
              {1.5e-7, "1.5e-07"},
              {1e15, "1000000000000000.0"},
              {1e16, "1e+16"},
              {123456789012345680.0, "1.2345678901234568e+17"},
              {0.1 + 0.2, "0.30000000000000004"},
              {5e-324, "5e-324"},
              {1.7976931348623157e308, "1.7976931348623157e+308"},
              {-2.5e-9, "-2.5e-09"},
              {9007199254740993.0, "9007199254740992.0"},
              {static_cast<double>(0.05220222473144531F), "0.05220222473144531"},
              {500000.0, "500000.0"},
              {HUGE_VAL, "Infinity"},
              {-HUGE_VAL, "-Infinity"}};
  for (const auto& row : rows) REQUIRE(python_float_repr(row.value) == row.repr);
  REQUIRE(python_float_repr(std::nan("")) == "NaN");
}

TEST_CASE("text that is not UTF-8 is not written", "[json][cpu]") {
  for (const char* text : {"\xff", "\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "a\xe2\x82"}) {
    REQUIRE(has(thrown<ValueError>([&] { (void)dump_python_json(Json(text)); }), "UTF-8"));
  }
}
