// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/importance.hpp"

#include <ATen/ATen.h>

#include "catch.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/format/model_layout.hpp"

using namespace qlorapp;

TEST_CASE("importance is the mean square of what each linear layer reads", "[train]") {
  CausalLM model = tiny::make_model(at::kFloat);
  std::vector<Example> rows;
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 11; ++i) {  // two batches
    Example row;
    for (int64_t k = 0; k <= i; ++k) row.input_ids.push_back(static_cast<TokenId>((7 * i + 3 * k) % 67));
    row.input_ids.push_back(1);
    row.labels.assign(row.input_ids.begin(), row.input_ids.end());
    tokens.insert(tokens.end(), row.input_ids.begin(), row.input_ids.end());
    rows.push_back(std::move(row));
  }
  const Importance found = measure_importance(model, rows);

  const std::vector<format::Parameter> linears = format::parameters(model.config(), format::Role::kLinear);
  REQUIRE(found.size() == linears.size());
  for (const format::Parameter& linear : linears) REQUIRE(std::ssize(found.at(linear.name())) == linear.shape[1]);
  const at::Tensor x = model.decoder().embed_tokens().index_select(0, at::tensor(at::ArrayRef<int64_t>(tokens))).to(at::kDouble);
  const at::Tensor norm = model.blocks().front().weights().dense.front().to(at::kDouble);
  const at::Tensor expected = (x * (x.square().mean(1, true) + 1e-5).rsqrt() * norm).square().mean(0);
  for (const char* const name : {"q_proj", "k_proj", "v_proj"}) {
    const at::Tensor own = at::tensor(at::ArrayRef<float>(found.at(message("model.layers.0.self_attn.{}.weight", name))));
    REQUIRE(at::allclose(own.to(at::kDouble), expected, 1e-5, 0));
  }
  REQUIRE(found.at("model.layers.3.mlp.gate_proj.weight") == found.at("model.layers.3.mlp.up_proj.weight"));
  REQUIRE(found.at("model.layers.3.mlp.gate_proj.weight") != found.at("model.layers.2.mlp.gate_proj.weight"));
  // Nobody looks on afterwards.
  REQUIRE(measure_importance(model, {rows.begin(), rows.begin() + 1}).at(linears[0].name()) != found.at(linears[0].name()));
}
