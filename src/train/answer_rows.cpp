// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/answer_rows.hpp"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "nn/generation_cache.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/nn/generate.hpp"
#include "text/unicode.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kCacheBytes = int64_t{256} << 20;

bool ends_answer(int64_t token, std::span<const int64_t> ends) { return std::ranges::find(ends, token) != ends.end(); }

/// Nothing if the row cannot be asked.
std::optional<HeldOutQuestion> question_of(const Example& row, std::span<const int64_t> ends, int64_t positions) {
  const size_t size = row.row_lengths.empty() ? row.labels.size() : static_cast<size_t>(row.row_lengths.front());
  const auto labels = std::span(row.labels).first(size);
  const auto is_trained = [](TokenId label) { return label != Example::kIgnored; };
  const auto begin = std::ranges::find_if(labels, is_trained);
  const auto prompt = begin - labels.begin();
  if (prompt == 0 || prompt >= positions) return std::nullopt;
  const auto end = std::find_if(begin, labels.end(), [&](TokenId label) { return !is_trained(label) || ends_answer(label, ends); });
  if (begin == end) return std::nullopt;
  return HeldOutQuestion{.row = 0, .prompt = {row.input_ids.begin(), row.input_ids.begin() + prompt}, .expected = {begin, end}};
}

std::string text_of(const std::vector<int64_t>& tokens, const AnswerOptions& options, bool skip_special_tokens) {
  if (options.decode) return options.decode(std::vector<TokenId>(tokens.begin(), tokens.end()), skip_special_tokens);
  return format::Json(tokens).dump();
}

}  // namespace

int64_t Answers::exact_matches() const { return std::ranges::count_if(rows, &RowAnswer::exact_match); }
int64_t Answers::stopped() const { return std::ranges::count_if(rows, &RowAnswer::stopped); }

std::string Answers::lines(int64_t step, const std::string& data) const {
  std::string text;
  for (const RowAnswer& row : rows) {
    format::Json line = {{"step", step}};
    if (!data.empty()) line["data"] = data;
    line["row"] = row.row;
    line["prompt"] = row.prompt;
    line["answer"] = row.answer;
    line["expected"] = row.expected;
    line["exact_match"] = row.exact_match;
    line["stopped"] = row.stopped;
    text += line.dump(-1, ' ', false, format::Json::error_handler_t::replace) + "\n";
  }
  return text;
}

std::vector<HeldOutQuestion> choose_questions(const std::vector<Example>& rows, int64_t count, std::span<const int64_t> ends,
                                              int64_t positions) {
  std::vector<size_t> found;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (question_of(rows[row], ends, positions)) found.push_back(row);
  }
  const size_t chosen = std::min(found.size(), static_cast<size_t>(std::max<int64_t>(count, 0)));
  std::vector<HeldOutQuestion> questions;
  for (size_t i = 0; i < chosen; ++i) {
    const size_t row = found[i * found.size() / chosen];
    questions.push_back(*question_of(rows[row], ends, positions));
    questions.back().row = static_cast<int64_t>(row);
  }
  return questions;
}

Answers judge_answers(const std::vector<HeldOutQuestion>& questions, const std::vector<std::vector<int64_t>>& generated,
                      const AnswerOptions& options) {
  QLORAPP_CHECK_VALUE(questions.size() == generated.size(), "[judge_answers] {} questions need as many answers; got {}.",
                      questions.size(), generated.size());
  Answers answers;
  for (size_t i = 0; i < questions.size(); ++i) {
    std::vector<int64_t> tokens = generated[i];
    const bool stopped = !tokens.empty() && ends_answer(tokens.back(), options.eos_token_ids);
    if (stopped) tokens.pop_back();
    RowAnswer row{.row = questions[i].row,
                  .prompt = text_of(questions[i].prompt, options, /*skip_special_tokens=*/false),
                  .answer = text_of(tokens, options, true),
                  .expected = text_of(questions[i].expected, options, true),
                  .stopped = stopped};
    row.exact_match = unicode::strip(row.answer) == unicode::strip(row.expected);
    answers.rows.push_back(std::move(row));
  }
  return answers;
}

std::optional<Answers> answer_rows(CausalLM& model, const std::vector<HeldOutQuestion>& questions, const AnswerOptions& options) {
  if (questions.empty()) return Answers();
  std::vector<std::vector<int64_t>> prompts;
  size_t longest = 0;
  for (const HeldOutQuestion& question : questions) {
    prompts.push_back(question.prompt);
    longest = std::max(longest, question.prompt.size());
  }
  const int64_t one_row = (static_cast<int64_t>(longest) + options.max_new_tokens) * cache_bytes_per_position(model);
  GenerateOptions all{.max_new_tokens = options.max_new_tokens,
                      .fits_positions = true,
                      .eos_token_ids = options.eos_token_ids,
                      .sampling = {},
                      .on_token = {},
                      .on_end = {},
                      .max_rows = options.max_rows,
                      .cache_bytes = std::max(kCacheBytes, one_row)};
  bool is_stopped = false;
  if (options.stop_now) {
    all.on_token = [&](int64_t, int64_t) {
      is_stopped = is_stopped || options.stop_now();
      return !is_stopped;
    };
  }
  const std::vector<std::vector<int64_t>> generated = generate(model, prompts, all);
  if (is_stopped) return std::nullopt;
  return judge_answers(questions, generated, options);
}

}  // namespace qlorapp
