// SPDX-License-Identifier: Apache-2.0
#include "format/config_json.hpp"

#include <string>

#include "catch.hpp"

using namespace qlorapp;
using format::Json;

namespace {

/// One member of every type that a table may have.
struct Sample {
  bool flag = false;
  int64_t count = 3;
  double rate = 0.5;
  std::string name = "linear";
  std::vector<std::string> names;
  std::optional<std::vector<int64_t>> layers;
  std::optional<double> limit;
  NamesOrPattern modules;
  std::variant<bool, std::string> init = true;
  std::map<std::string, int64_t> ranks;

  static constexpr auto fields() {
    return FieldTable{Field{"flag", &Sample::flag, ""},          Field{"count", &Sample::count, ""},
                      Field{"learning_rate", &Sample::rate, ""}, Field{"name", &Sample::name, ""},
                      Field{"names", &Sample::names, ""},        Field{"layers", &Sample::layers, ""},
                      Field{"limit", &Sample::limit, ""},        Field{"modules", &Sample::modules, ""},
                      Field{"init", &Sample::init, ""},          Field{"ranks", &Sample::ranks, ""}};
  }
  static constexpr std::array<Alias, 1> aliases() { return {Alias{"lr", "learning_rate"}}; }
};

Sample read(const std::string& text) {
  Sample sample;
  format::from_json(format::parse_json(text, "t.json"), sample, "t.json");
  return sample;
}

template <class Error>
std::string error_of(const std::string& text) {
  try {
    (void)read(text);
  } catch (const Error& error) { return error.what(); }
  return "no error";
}

}  // namespace

TEST_CASE("every member type goes to JSON and back", "[format][cpu]") {
  const std::string text =
      R"({"flag":true,"count":-7,"learning_rate":0.0001,"name":"ü","names":["a","b"],"layers":[1,2],"limit":2.5,"modules":["q"],)"
      R"("init":"gaussian","ranks":{"x":4}})";
  REQUIRE(format::to_json(read(text)) == format::parse_json(text, "t"));
  REQUIRE(format::to_json(read(text)).dump() == text);  // and in the order of the table
  REQUIRE(format::to_json(Sample{}).dump() ==
          R"({"flag":false,"count":3,"learning_rate":0.5,"name":"linear","names":[],"layers":null,"limit":null,"modules":null,)"
          R"("init":true,"ranks":{}})");
  REQUIRE(format::to_json(read(R"({"modules":".*_proj"})"))["modules"] == ".*_proj");
}

TEST_CASE("absent keys keep their value, so that sources can be laid over each other", "[format][cpu]") {
  Sample sample = read(R"({"count":9,"flag":true})");
  format::from_json(format::parse_json(R"({"count":10})", "t"), sample, "t");
  REQUIRE(sample.count == 10);
  REQUIRE(sample.flag);
  REQUIRE(sample.rate == 0.5);
}

TEST_CASE("a number without a fraction is an integer, an integer is a number, and one value stands for a list of one",
          "[format][cpu]") {
  REQUIRE(read(R"({"count":1e3})").count == 1000);
  REQUIRE(read(R"({"learning_rate":2})").rate == 2.0);
  REQUIRE(read(R"({"names":"a"})").names == std::vector<std::string>{"a"});
  REQUIRE(read(R"({"layers":4})").layers == std::vector<int64_t>{4});
  REQUIRE_FALSE(read(R"({"layers":null,"modules":null})").layers.has_value());
}

TEST_CASE("a value of another type names the key, what is wanted and what is there", "[format][cpu]") {
  const auto [text, message] = GENERATE(table<std::string, std::string>({
      {R"({"learning_rate":"1e-4"})", "[t.json] 'learning_rate' must be a number; got string '\"1e-4\"'."},
      {R"({"lr":true})", "[t.json] 'lr' must be a number; got boolean 'true'."},
      {R"({"flag":1})", "[t.json] 'flag' must be true or false; got number '1'."},
      {R"({"count":1.5})", "[t.json] 'count' must be an integer; got number '1.5'."},
      {R"({"count":-1e300})", "[t.json] 'count' must be an integer in digits, below 2^63; got number '-1e+300'."},
      {R"({"count":null})", "[t.json] 'count' must be an integer; got null 'null'."},
      {R"({"name":[]})", "[t.json] 'name' must be a string; got array '[]'."},
      {R"({"names":["a",1]})", "[t.json] 'names' must be a list, each entry a string; got array '[\"a\",1]'."},
      {R"({"layers":["1"]})", "[t.json] 'layers' must be a list, each entry an integer, or null; got array '[\"1\"]'."},
      {R"({"modules":7})", "[t.json] 'modules' must be a string or a list of strings; got number '7'."},
      {R"({"init":3})", "[t.json] 'init' must be true or false or a string; got number '3'."},
      {R"({"ranks":{"a":"b"}})", "[t.json] 'ranks' must be an object, each value an integer; got object '{\"a\":\"b\"}'."},
      {R"([1])", "[t.json] must be an object of options; got array."},
  }));
  REQUIRE(error_of<TypeError>(text) == message);
}

TEST_CASE("unknown options suggest the nearest, one option under two spellings is refused, and errors change nothing",
          "[format][cpu]") {
  REQUIRE(error_of<ValueError>(R"({"learnign_rate":1})") ==
          "[t.json] unknown option 'learnign_rate'. Did you mean 'learning_rate'?");
  REQUIRE(error_of<ValueError>(R"({"zzzzzz":1})") == "[t.json] unknown option 'zzzzzz'.");
  REQUIRE(error_of<ValueError>(R"({"lr":1,"learning_rate":2})") ==
          "[t.json] 'lr' and 'learning_rate' are the same option. Give one of them.");
  REQUIRE(read(R"({"lr":0.25})").rate == 0.25);
  Sample sample;
  REQUIRE_THROWS_AS(format::from_json(format::parse_json(R"({"count":5,"flag":0})", "t"), sample, "t"), TypeError);
  REQUIRE(sample.count == 3);
}
