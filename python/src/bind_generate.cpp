// SPDX-License-Identifier: Apache-2.0
// Generation: choosing tokens, and the loop around it.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <span>

#include "bind.hpp"
#include "core/check.hpp"
#include "nn/generation_cache.hpp"
#include "nn/host_values.hpp"
#include "qlorapp/nn/generate.hpp"
#include "qlorapp/text/stop_strings.hpp"

namespace qlorapp::python {
namespace {

SamplingOptions sampling(bool do_sample, double temperature, int64_t top_k, double top_p, double min_p, double repetition_penalty,
                         uint64_t seed, bool torch_draws) {
  return {do_sample, temperature, top_k, top_p, min_p, repetition_penalty, seed, torch_draws};
}

StopStrings stop_strings(std::vector<std::string> strings, const py::function& decode) {
  return {std::move(strings), [decode](std::span<const TokenId> ids) {
            return decode(std::vector<TokenId>(ids.begin(), ids.end())).cast<std::string>();
          }};
}

/// Without on_token: acquiring the GIL for every token of every row would take longer than a step of a small model.
constexpr std::chrono::milliseconds kBetweenSignals{20};

/// on_token(row, token) and on_end(row, tokens) are called with the GIL; between tokens signals are looked for, so that a stop button works.
std::vector<std::vector<int64_t>> generate_rows(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                                int64_t max_new_tokens, int64_t min_new_tokens, std::vector<int64_t> eos_token_ids,
                                                const SamplingOptions& options, const std::optional<py::function>& on_token,
                                                const std::optional<py::function>& on_end, int64_t max_rows, int64_t cache_bytes,
                                                bool deterministic, bool fits_positions) {
  GenerateOptions all{.max_new_tokens = max_new_tokens,
                      .fits_positions = fits_positions,
                      .min_new_tokens = min_new_tokens,
                      .eos_token_ids = std::move(eos_token_ids),
                      .sampling = options,
                      .on_token = {},
                      .on_end = {},
                      .max_rows = max_rows,
                      .deterministic = deterministic,
                      .cache_bytes = cache_bytes};
  auto looked = std::chrono::steady_clock::now();
  all.on_token = [&](int64_t row, int64_t token) {
    const auto now = std::chrono::steady_clock::now();
    if (!on_token && now - looked < kBetweenSignals) return true;
    looked = now;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return !on_token || (*on_token)(row, token).cast<bool>();
  };
  if (on_end) {
    all.on_end = [&](int64_t row, std::span<const int64_t> tokens) {
      const py::gil_scoped_acquire gil;
      (*on_end)(row, std::vector<int64_t>(tokens.begin(), tokens.end()));
    };
  }
  const py::gil_scoped_release no_gil;
  return generate(model, prompts, all);
}

/// (rows, V) bool with the tokens of each list.
at::Tensor tokens_mask(const std::vector<at::Tensor>& tokens, const at::Tensor& logits) {
  if (tokens.empty()) return {};
  at::Tensor mask = logits.new_zeros(logits.sizes(), logits.options().dtype(at::kBool));
  for (size_t row = 0; row < tokens.size(); ++row) mask.select(0, static_cast<int64_t>(row)).index_fill_(0, tokens[row], true);
  return mask;
}

/// Hidden states of tokens that follow those of the cache's rows: of each row's last one, or of all.
at::Tensor forward_cached(CausalLM& model, GenerationCache& cache, const at::Tensor& tokens, const std::vector<int64_t>& counts,
                          bool every_token) {
  QLORAPP_CHECK_VALUE(std::ssize(counts) == cache.row_count(), "[cache] counts must have one number per row, {}; got {}.",
                      cache.row_count(), counts.size());
  std::vector<int64_t> rows(counts.size());
  std::iota(rows.begin(), rows.end(), int64_t{0});
  int64_t longest = 0;
  for (size_t row = 0; row < counts.size(); ++row) longest = std::max(longest, cache.lengths[row] + counts[row]);
  cache.reserve(longest);
  return forward_cached(model, tokens.to(model.device()), rows, counts, cache, every_token);
}

}  // namespace

void bind_generate(py::module_& m) {
  py::class_<SamplingOptions>(m, "SamplingOptions", "include/qlorapp/nn/sampling.hpp")
      .def(py::init(&sampling), py::kw_only(), py::arg("do_sample") = false, py::arg("temperature") = 1.0, py::arg("top_k") = 0,
           py::arg("top_p") = 1.0, py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0, py::arg("seed") = 0,
           py::arg("torch_draws") = false);
  py::class_<GenerationCache>(m, "GenerationCache", "Keys and values per row; src/nn/generation_cache.hpp.")
      .def_readonly("lengths", &GenerationCache::lengths)
      .def_readonly("capacity", &GenerationCache::capacity)
      .def_readwrite("adapters_are_constant", &GenerationCache::adapters_are_constant)
      .def(
          "select_rows", [](GenerationCache& self, const std::vector<int64_t>& rows) { self.select_rows(rows); }, py::arg("rows"),
          NoGil())
      .def("remove_last", &GenerationCache::remove_last, py::arg("count"))
      .def(
          "blocks",
          [](const GenerationCache& self) {
            std::vector<std::pair<at::Tensor, at::Tensor>> blocks;
            for (const KeyValueCache& block : self.blocks) blocks.emplace_back(block.keys, block.values);
            return blocks;
          },
          "[(keys, values)] per block, each (rows * capacity, key-value heads, head_dim).");
  m.def(
      "make_cache", [](const CausalLM& model, int64_t rows, int64_t capacity) { return make_cache(model, rows, capacity); },
      py::arg("model"), py::arg("rows"), py::arg("capacity"), NoGil());
  m.def("forward_cached", &forward_cached, py::arg("model"), py::arg("cache"), py::arg("tokens"), py::arg("counts"),
        py::arg("every_token") = false, NoGil(), "A forward pass over all rows that appends to the cache, which grows as needed.");
  py::class_<StopStrings>(m, "StopStrings", "include/qlorapp/text/stop_strings.hpp; decode(ids) returns the text of tokens.")
      .def(py::init(&stop_strings), py::arg("strings"), py::arg("decode"))
      .def(
          "begin", [](StopStrings& self, int64_t row, const std::vector<TokenId>& prompt) { self.begin(row, prompt); },
          py::arg("row"), py::arg("prompt"))
      .def("add", &StopStrings::add, py::arg("row"), py::arg("token"), "Whether the row ends with the token.")
      .def("ended", &StopStrings::ended, py::arg("row"))
      .def("unmatched", &StopStrings::unmatched);
  m.def("generate", &generate_rows, py::arg("model"), py::arg("prompts"), py::kw_only(), py::arg("max_new_tokens"),
        py::arg("min_new_tokens") = 0, py::arg("eos_token_ids") = std::vector<int64_t>{}, py::arg("sampling") = SamplingOptions{},
        py::arg("on_token") = std::nullopt, py::arg("on_end") = std::nullopt, py::arg("max_rows") = GenerateOptions{}.max_rows,
        py::arg("cache_bytes") = 0, py::arg("deterministic") = false, py::arg("fits_positions") = false,
        "The new tokens of each prompt; on_token(row, token) returning False ends a row, on_end(row, tokens) gets it when it has "
        "ended. include/qlorapp/nn/generate.hpp.");
  m.def(
      "warped_logits",
      [](const at::Tensor& logits, const std::vector<at::Tensor>& seen, const SamplingOptions& options) {
        return warped_logits(logits, tokens_mask(seen, logits), {}, options);
      },
      py::arg("logits"), py::arg("seen"), py::arg("sampling"), NoGil());
  m.def(
      "choose_tokens",
      [](const at::Tensor& logits, const std::vector<int64_t>& rows, int64_t position, const SamplingOptions& options) {
        return ArrivingValues(choose_tokens(logits, rows, std::vector<int64_t>(rows.size(), position), options)).read();
      },
      py::arg("logits"), py::arg("rows"), py::arg("position"), py::arg("sampling"), NoGil());
}

}  // namespace qlorapp::python
