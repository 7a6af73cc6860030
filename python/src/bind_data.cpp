// SPDX-License-Identifier: Apache-2.0
// Rows and packs.
#include "bind.hpp"
#include "core/check.hpp"
#include "qlorapp/data/packing.hpp"

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

}  // namespace

void bind_data(py::module_& m) {
  m.def(
      "best_fit_decreasing",
      [](const std::vector<int64_t>& lengths, int64_t capacity) { return best_fit_decreasing(lengths, capacity); },
      py::arg("lengths"), py::arg("capacity"), NoGil(), "Which of the lengths go together; include/qlorapp/data/packing.hpp.");
  m.def("pack", &pack_rows, py::arg("rows"), py::arg("max_length"), py::arg("strategy") = "bfd", NoGil(),
        "[(input_ids, labels)] → [(input_ids, labels, row_lengths)]; include/qlorapp/data/packing.hpp.");
}

}  // namespace qlorapp::python
