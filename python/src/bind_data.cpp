// SPDX-License-Identifier: Apache-2.0
// Rows and packs.
#include "bind.hpp"
#include "core/check.hpp"
#include "data/answers.hpp"
#include "data/row_message.hpp"
#include "qlorapp/data/packing.hpp"
#include "qlorapp/text/chat_template.hpp"

namespace qlorapp::python {
namespace {

using IdsAndLabels = std::pair<std::vector<TokenId>, std::vector<TokenId>>;
using Pack = std::tuple<std::vector<TokenId>, std::vector<TokenId>, std::vector<int64_t>>;

std::vector<Pack> pack_rows(std::vector<IdsAndLabels> rows, int64_t max_length, const std::string& strategy) {
  std::vector<Example> examples;
  for (auto& [ids, labels] : rows) {
    examples.push_back({std::move(ids), std::move(labels), static_cast<int64_t>(examples.size()) + 1});
    QLORAPP_CHECK_VALUE(examples.back().input_ids.size() == examples.back().labels.size(),
                        "[pack] row {} has {} input_ids and {} labels. They must pair up.", examples.size() - 1,
                        examples.back().input_ids.size(), examples.back().labels.size());
  }
  std::vector<Pack> packs;
  for (Example& example : pack(examples, max_length, packing_strategy(strategy)).examples) {
    packs.emplace_back(std::move(example.input_ids), std::move(example.labels), std::move(example.row_lengths));
  }
  return packs;
}

using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

/// The texts that train the wanted answers of a conversation, and the bytes of them that are trained.
std::vector<std::pair<std::string, Ranges>> trained_texts_of(const ChatTemplate& chat, const std::string& conversation,
                                                             const std::vector<bool>& wanted, const std::string& tools,
                                                             const std::string& variables, const std::string& today) {
  std::vector<Message> messages;
  for (const Row& entry : parse_row(conversation, "messages")) messages.push_back(read_message(entry, "messages").message);
  QLORAPP_CHECK_VALUE(messages.size() == wanted.size(), "[chat_template] {} messages need as many flags; got {}.", messages.size(),
                      wanted.size());
  GivenTextTools template_only(nullptr, &chat);
  std::vector<std::pair<std::string, Ranges>> out;
  for (TrainedText& text :
       trained_texts(template_only, messages, wanted, {.today = today, .tools = tools, .variables = variables})) {
    Ranges ranges;
    for (const TextRange& range : text.trained) ranges.emplace_back(range.begin, range.end);
    out.emplace_back(std::move(text.text), std::move(ranges));
  }
  return out;
}

}  // namespace

void bind_data(py::module_& m) {
  m.def(
      "best_fit_decreasing",
      [](const std::vector<int64_t>& lengths, int64_t capacity) { return best_fit_decreasing(lengths, capacity); },
      py::arg("lengths"), py::arg("capacity"), NoGil(), "Which of the lengths go together; include/qlorapp/data/packing.hpp.");
  py::class_<ChatTemplate>(m, "ChatTemplate", "include/qlorapp/text/chat_template.hpp.")
      .def(py::init([](const std::string& jinja, const std::map<std::string, std::string>& tokens,
                       const std::vector<std::string>& special_tokens) {
             return ChatTemplate::from_source(jinja, tokens, "chat_template").with_special_tokens(special_tokens);
           }),
           py::arg("jinja"), py::arg("tokens"), py::arg("special_tokens"))
      .def("trained_texts", &trained_texts_of, py::arg("messages"), py::arg("wanted"), py::arg("tools"), py::arg("variables"),
           py::arg("today"), NoGil(),
           "[(text, trained ranges of its bytes)]; messages, tools and variables are JSON, \"\" for none; src/data/answers.hpp.");
  m.def("pack", &pack_rows, py::arg("rows"), py::arg("max_length"), py::arg("strategy") = "bfd", NoGil(),
        "[(input_ids, labels)] → [(input_ids, labels, row_lengths)]; include/qlorapp/data/packing.hpp.");
}

}  // namespace qlorapp::python
