// SPDX-License-Identifier: Apache-2.0
// Answers to held-out rows, and the base against the adapter.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "core/check.hpp"
#include "qlorapp/train/answer_rows.hpp"
#include "qlorapp/train/comparison.hpp"
#include "train/answer_file.hpp"
#include "train/comparison_svg.hpp"

namespace qlorapp::python {
namespace {

using IdsAndLabels = std::pair<std::vector<TokenId>, std::vector<TokenId>>;
using Score = std::map<std::string, std::optional<double>>;

std::vector<HeldOutQuestion> choose(std::vector<IdsAndLabels> rows, int64_t count, const std::vector<int64_t>& eos_token_ids,
                                    int64_t positions) {
  std::vector<Example> examples;
  for (auto& [ids, labels] : rows) {
    QLORAPP_CHECK_VALUE(ids.size() == labels.size(), "[choose_questions] row {} has {} input_ids and {} labels. They must pair up.",
                        examples.size(), ids.size(), labels.size());
    examples.push_back({std::move(ids), std::move(labels)});
  }
  return choose_questions(examples, count, eos_token_ids, positions);
}

Answers judge(const std::vector<HeldOutQuestion>& questions, const std::vector<std::vector<int64_t>>& generated,
              const std::vector<int64_t>& eos_token_ids, const std::function<std::string(std::vector<TokenId>, bool)>& decode) {
  const AnswerOptions options{
      .eos_token_ids = eos_token_ids,
      .decode = [&](std::span<const TokenId> ids, bool skip) { return decode(std::vector<TokenId>(ids.begin(), ids.end()), skip); },
      .stop_now = {}};
  return judge_answers(questions, generated, options);
}

RunScore score_of(const Score& values) {
  const auto number = [&](const char* name) {
    const auto found = values.find(name);
    return found == values.end() ? std::optional<double>() : found->second;
  };
  const auto count = [&](const char* name) -> std::optional<int64_t> {
    const std::optional<double> value = number(name);
    return value ? std::optional(static_cast<int64_t>(*value)) : std::nullopt;
  };
  return {number("eval_loss"), number("neutral_loss"), count("exact_matches"), count("stopped")};
}

Comparison comparison(int64_t eval_rows, int64_t answers, int64_t neutral_tokens, const std::optional<Score>& base,
                      const Score& adapter) {
  return {eval_rows, answers, neutral_tokens, base ? std::optional(score_of(*base)) : std::nullopt, score_of(adapter)};
}

}  // namespace

void bind_answers(py::module_& m) {
  py::class_<HeldOutQuestion>(m, "HeldOutQuestion", "include/qlorapp/train/answer_rows.hpp")
      .def_readonly("row", &HeldOutQuestion::row)
      .def_readonly("prompt", &HeldOutQuestion::prompt)
      .def_readonly("expected", &HeldOutQuestion::expected);
  py::class_<Answers>(m, "JudgedAnswers", "include/qlorapp/train/answer_rows.hpp")
      .def_property_readonly("exact_matches", &Answers::exact_matches)
      .def_property_readonly("stopped", &Answers::stopped)
      .def("lines", &Answers::lines, py::arg("step"), py::arg("data") = "");
  m.def("choose_questions", &choose, py::arg("rows"), py::arg("count"), py::arg("eos_token_ids"), py::arg("positions"), NoGil(),
        "Of rows [(input_ids, labels)]; include/qlorapp/train/answer_rows.hpp.");
  m.def("judge_answers", &judge, py::arg("questions"), py::arg("generated"), py::arg("eos_token_ids"), py::arg("decode"),
        "decode(ids, skip_special_tokens) → text; include/qlorapp/train/answer_rows.hpp.");
  py::class_<AnswerFile>(m, "AnswerFile", "eval_answers.jsonl; src/train/answer_file.hpp.")
      .def(py::init<const std::string&, std::optional<int64_t>>(), py::arg("folder"), py::arg("resumed_at"), NoGil())
      .def("add", &AnswerFile::add, py::arg("step"), py::arg("lines"), py::arg("data") = "", NoGil());
  m.def("neutral_text", [] { return std::string(neutral_text()); });
  py::class_<Comparison>(m, "Comparison", "include/qlorapp/train/comparison.hpp")
      .def(py::init(&comparison), py::kw_only(), py::arg("eval_rows"), py::arg("answers"), py::arg("neutral_tokens"),
           py::arg("base"), py::arg("adapter"),
           "base and adapter: {\"eval_loss\", \"neutral_loss\", \"exact_matches\", \"stopped\"}, the last two counts; None: not "
           "measured.")
      .def_property_readonly("is_empty", &Comparison::is_empty)
      .def("json", [](const Comparison& self) { return self.to_json().dump(); })
      .def("table", &Comparison::table)
      .def(
          "write_svg", [](const Comparison& self, const std::string& folder) { write_comparison_svg(folder, self); },
          py::arg("folder"), NoGil());
}

}  // namespace qlorapp::python
