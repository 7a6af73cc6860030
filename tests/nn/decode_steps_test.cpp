// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <numeric>

#include "catch.hpp"
#include "nn/generation_cache.hpp"
#include "nn/tiny_model.hpp"

using namespace qlorapp;

namespace {

/// Rows of a cache and what they hold; each step is compared with the pass of the whole rows.
class Rows {
 public:
  Rows(CausalLM& model, std::vector<std::vector<int64_t>> rows) : model_(model), rows_(std::move(rows)) { begin(); }

  /// Anew, with keys of the model as it is now.
  void begin() {
    cache_ = make_cache(model_, std::ssize(rows_), 40);
    std::vector<int64_t> tokens, counts;
    for (const auto& row : rows_) {
      tokens.insert(tokens.end(), row.begin(), row.end());
      counts.push_back(std::ssize(row));
    }
    compare(forward_cached(model_, on_device(tokens), all(), counts, cache_));
  }

  void step() {
    std::vector<int64_t> tokens;
    for (auto& row : rows_) tokens.push_back(row.emplace_back((row.back() * 5 + std::ssize(row)) % 67));
    compare(forward_cached(model_, on_device(tokens), all(), std::vector<int64_t>(rows_.size(), 1), cache_));
  }

 private:
  [[nodiscard]] std::vector<int64_t> all() const {
    std::vector<int64_t> rows(rows_.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    return rows;
  }
  [[nodiscard]] at::Tensor on_device(const std::vector<int64_t>& values) const {
    return at::tensor(values, at::kLong).to(model_.device());
  }

  void compare(const at::Tensor& hidden) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < rows_.size(); ++i) {
      const auto n = std::ssize(rows_[i]);
      const Batch batch{at::tensor(rows_[i], at::kLong), at::full({n}, -100, at::kLong), at::arange(n, at::kLong), {0, n}, 0};
      const at::Tensor whole = model_.hidden_states(batch.to(model_.device()), false, 0, 0).narrow(0, n - 1, 1);
      REQUIRE(at::allclose(hidden.narrow(0, static_cast<int64_t>(i), 1), whole, 1e-4, 1e-4));
    }
  }

  CausalLM& model_;
  std::vector<std::vector<int64_t>> rows_;
  GenerationCache cache_;
};

void randomize(CausalLM& model, double by) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : model.arena().parameters())
    parameter.detach().add_(at::randn(parameter.sizes(), parameter.options()) * by);
}

}  // namespace

TEST_CASE("a step over a cache is the pass of the whole row, whatever becomes of the adapter", "[nn]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  if (GENERATE(false, true)) {
    LoraConfig dora;
    dora.r = 3;
    dora.use_dora = true;
    dora.target_modules = {"q_proj", "k_proj", "o_proj", "up_proj", "down_proj"};
    model.adapters().remove(kDefaultAdapter);
    model.add_adapters(dora, 2);
    randomize(model, 0.1);
  }
  Rows rows(model, {{1, 7, 3, 12}, {5}, {9, 9, 4, 2, 33, 8, 1}});
  for (int i = 0; i < 6; ++i) rows.step();
  randomize(model, 0.2);
  rows.begin();
  for (int i = 0; i < 3; ++i) rows.step();
  model.adapters().enable(false);
  rows.begin();
  rows.step();
  model.adapters().enable(true);
  LoraConfig other;
  other.r = 2;
  other.target_modules = {"v_proj", "gate_proj"};
  model.add_adapters(other, 3, "other");
  randomize(model, 0.1);
  model.adapters().activate("other");
  randomize(model, 0.3);
  rows.begin();
  rows.step();
  // A parameter whose memory a user replaced counts from the next step on.
  const at::Tensor& parameter = model.arena().parameter(0);
  parameter.set_data(at::randn_like(parameter));
  rows.begin();
  rows.step();
}
