// SPDX-License-Identifier: Apache-2.0
// Generation: choosing tokens, and the loop around it.
#include "bind.hpp"
#include "qlorapp/nn/generate.hpp"

namespace qlorapp::python {
namespace {

SamplingOptions sampling(bool do_sample, double temperature, int64_t top_k, double top_p, double min_p, double repetition_penalty,
                         uint64_t seed) {
  return {do_sample, temperature, top_k, top_p, min_p, repetition_penalty, seed};
}

/// on_token(row, token) is asked with the GIL; between tokens signals are looked for, so that a stop button works.
std::vector<std::vector<int64_t>> generate_rows(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                                int64_t max_new_tokens, int64_t min_new_tokens, std::vector<int64_t> eos_token_ids,
                                                const SamplingOptions& options, const std::optional<py::function>& on_token) {
  GenerateOptions all{max_new_tokens, min_new_tokens, std::move(eos_token_ids), options, {}};
  all.on_token = [&](int64_t row, int64_t token) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return !on_token || (*on_token)(row, token).cast<bool>();
  };
  const py::gil_scoped_release no_gil;
  return generate(model, prompts, all);
}

}  // namespace

void bind_generate(py::module_& m) {
  py::class_<SamplingOptions>(m, "SamplingOptions", "include/qlorapp/nn/sampling.hpp")
      .def(py::init(&sampling), py::kw_only(), py::arg("do_sample") = false, py::arg("temperature") = 1.0, py::arg("top_k") = 0,
           py::arg("top_p") = 1.0, py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0, py::arg("seed") = 0);
  m.def("generate", &generate_rows, py::arg("model"), py::arg("prompts"), py::kw_only(), py::arg("max_new_tokens"),
        py::arg("min_new_tokens") = 0, py::arg("eos_token_ids") = std::vector<int64_t>{}, py::arg("sampling") = SamplingOptions{},
        py::arg("on_token") = std::nullopt, "The new tokens of each prompt; on_token(row, token) returning False ends a row.");
  m.def(
      "warped_logits",
      [](const at::Tensor& logits, const std::vector<at::Tensor>& seen, const std::vector<int64_t>& blocked,
         const SamplingOptions& options) { return warped_logits(logits, seen, blocked, options); },
      py::arg("logits"), py::arg("seen"), py::arg("blocked"), py::arg("sampling"), NoGil());
  m.def(
      "choose_tokens",
      [](const at::Tensor& logits, const std::vector<int64_t>& rows, int64_t position, const SamplingOptions& options) {
        return choose_tokens(logits, rows, position, options);
      },
      py::arg("logits"), py::arg("rows"), py::arg("position"), py::arg("sampling"), NoGil());
}

}  // namespace qlorapp::python
