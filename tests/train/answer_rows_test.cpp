// SPDX-License-Identifier: Apache-2.0
// Which rows are asked, what counts as the same answer, and that the file of answers has each evaluation once.
#include "qlorapp/train/answer_rows.hpp"

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "files/folder.hpp"
#include "format/expect_error.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/train/comparison.hpp"
#include "train/answer_file.hpp"
#include "train/comparison_svg.hpp"

using namespace qlorapp;

namespace {

constexpr TokenId kNone = Example::kIgnored;
const std::vector<int64_t> kEnds{2};

Example labeled(std::vector<TokenId> ids, std::vector<TokenId> labels) {
  Example row;
  row.input_ids = std::move(ids);
  row.labels = std::move(labels);
  return row;
}

std::vector<Example> askable(size_t count) {
  std::vector<Example> rows;
  for (size_t i = 0; i < count; ++i) rows.push_back(labeled({static_cast<TokenId>(10 + i), 7, 2}, {kNone, 7, 2}));
  return rows;
}

std::vector<int64_t> numbers(const std::vector<HeldOutQuestion>& questions) {
  std::vector<int64_t> rows;
  for (const HeldOutQuestion& question : questions) rows.push_back(question.row);
  return rows;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("questions are evenly spaced rows that have a prompt and an answer", "[answers]") {
  CHECK(numbers(choose_questions(askable(9), 3, kEnds, 100)) == std::vector<int64_t>{0, 3, 6});
  CHECK(numbers(choose_questions(askable(3), 8, kEnds, 100)) == std::vector<int64_t>{0, 1, 2});
  CHECK(choose_questions(askable(3), 0, kEnds, 100).empty());
  std::vector<Example> rows = askable(5);
  rows[0] = labeled({5, 6, 2}, {5, 6, 2});              // trained as a whole
  rows[1] = labeled({5, 6, 2}, {kNone, kNone, kNone});  // nothing is trained
  rows[2] = labeled({5, 6, 2}, {kNone, kNone, 2});      // nothing but the end
  CHECK(numbers(choose_questions(rows, 5, kEnds, 100)) == std::vector<int64_t>{3, 4});
}

TEST_CASE("a question is the tokens before the first answer, and expects them up to its end", "[answers]") {
  const std::vector<Example> turns{
      labeled({1, 5, 6, 7, 2, 8, 9, 2}, {kNone, kNone, 6, 7, 2, kNone, 9, 2}),     // two answers
      labeled({1, 5, 6, 7, 8, 9, 2, 3}, {kNone, kNone, 6, 7, kNone, 9, 2, kNone})  // an answer without an end
  };
  const std::vector<HeldOutQuestion> found = choose_questions(turns, 2, kEnds, 100);
  for (const HeldOutQuestion& question : found) {
    CHECK(question.prompt == std::vector<int64_t>{1, 5});
    CHECK(question.expected == std::vector<int64_t>{6, 7});
  }
  CHECK(choose_questions(turns, 2, kEnds, 2).empty());  // the model has no position for an answer
  Example pack = labeled({5, 6, 2, 9, 8, 2}, {kNone, 6, 2, kNone, 8, 2});
  pack.row_lengths = {3, 3};
  CHECK(choose_questions({pack}, 1, kEnds, 100).front().expected == std::vector<int64_t>{6});
  pack.labels = {5, 6, 2, kNone, 8, 2};
  CHECK(choose_questions({pack}, 1, kEnds, 100).empty());  // the first row has no prompt; the second is not looked at
}

TEST_CASE("an answer matches without its end and the white space around it", "[answers]") {
  const std::vector<HeldOutQuestion> questions{{0, {1}, {32, 65}}, {1, {1}, {65}}, {2, {1}, {65}}};
  AnswerOptions options;
  options.eos_token_ids = kEnds;
  options.decode = [](std::span<const TokenId> ids, bool) { return std::string(ids.begin(), ids.end()); };
  const Answers answers = judge_answers(questions, {{65, 32, 2}, {65, 66}, {65}}, options);
  CHECK(answers.exact_matches() == 2);
  CHECK(answers.stopped() == 1);
  CHECK(answers.rows[0].answer == "A ");
  const auto line = nlohmann::json::parse(answers.lines(7).substr(0, answers.lines(7).find('\n')));
  CHECK(line["step"] == 7);
  CHECK(line["exact_match"] == true);
  CHECK(!line.contains("data"));
  CHECK(answers.lines(7, "a").find("\"data\":\"a\"") != std::string::npos);
  options.decode = {};  // no tokenizer: the tokens
  CHECK(judge_answers(questions, {{32, 65, 2}, {65, 66}, {32, 65}}, options).exact_matches() == 1);
  CHECK(has(thrown<ValueError>([&] { static_cast<void>(judge_answers(questions, {{1}}, options)); }), "3 questions"));
}

TEST_CASE("the file of answers has each evaluation once, in whole lines", "[answers]") {
  const TemporaryFolder folder;
  const std::string path = files::path_in(folder.path(), kAnswerFile);
  const auto line = [](int step, const char* more = "") { return "{\"step\":" + std::to_string(step) + more + "}\n"; };
  AnswerFile begun(folder.path(), std::nullopt);
  for (const int step : {2, 4, 6}) begun.add(step, line(step) + line(step));
  CHECK(text_of(path) == line(2) + line(2) + line(4) + line(4) + line(6) + line(6));
  begun.add(4, line(4));  // rolled back
  CHECK(text_of(path) == line(2) + line(2) + line(4));
  begun.add(4, line(4, ",\"data\":\"b\""), "b");  // another set of rows, in the same evaluation
  CHECK(text_of(path) == line(2) + line(2) + line(4) + line(4, ",\"data\":\"b\""));
  begun.add(4, line(4));  // an evaluation again
  CHECK(text_of(path) == line(2) + line(2) + line(4, ",\"data\":\"b\"") + line(4));
  std::ofstream(path, std::ios::app) << "{\"step\":6";  // the machine lost its power
  AnswerFile resumed(folder.path(), 3);
  CHECK(text_of(path) == line(2) + line(2));
  resumed.add(4, line(4));
  CHECK(text_of(path) == line(2) + line(2) + line(4));
  const AnswerFile anew(folder.path(), std::nullopt);
  CHECK(!files::exists(path));
}

TEST_CASE("base and adapter are compared on the same rows, and the adapter is in use again", "[answers]") {
  CausalLM model = tiny::make_model(at::kFloat, 0.1);
  const std::vector<Example> rows = askable(4);
  CompareOptions options;
  options.eval.batch_size = 2;
  options.neutral_ids = {3, 4, 5, 6};
  options.answers.max_new_tokens = 3;
  options.answers.eos_token_ids = kEnds;
  options.questions = choose_questions(rows, 2, kEnds, 64);
  const std::optional<Comparison> found = compare_with_base(model, rows, options);
  REQUIRE(found);
  REQUIRE(found->base);
  CHECK(model.adapters().in_use());
  CHECK(*found->adapter.eval_loss == evaluate(model, rows, {.batch_size = 2, .after_each_batch = {}}).mean_of_batches);
  model.adapters().enable(false);
  CHECK(*found->base->eval_loss == evaluate(model, rows, {.batch_size = 2, .after_each_batch = {}}).mean_of_batches);
  model.adapters().enable(true);
  CHECK(*found->base->eval_loss != *found->adapter.eval_loss);
  CHECK(*found->base->neutral_loss != *found->adapter.neutral_loss);
  CHECK(found->to_json()["answers"] == 2);
  CHECK(found->table().size() == 5);
  CHECK(comparison_svg(*found).find("held-out loss, 4 rows") != std::string::npos);
  options.known = {.eval_loss = 1.5, .neutral_loss = {}, .exact_matches = 2, .stopped = 1};
  const std::optional<Comparison> known = compare_with_base(model, rows, options);
  REQUIRE(known);
  CHECK(*known->adapter.eval_loss == 1.5);
  CHECK(*known->adapter.exact_matches == 2);
  CHECK(known->adapter.neutral_loss == found->adapter.neutral_loss);
  CHECK(known->base->eval_loss == found->base->eval_loss);
  CHECK(known->base->exact_matches == found->base->exact_matches);
  options.known = {};
  options.answers.stop_now = [] { return true; };
  CHECK(!compare_with_base(model, rows, options));
  CHECK(model.adapters().in_use());
  options.answers.stop_now = {};
  options.questions.front().prompt = {1000000};  // what fails in the middle
  CHECK_THROWS_AS(compare_with_base(model, rows, options), ValueError);
  CHECK(model.adapters().in_use());
}
