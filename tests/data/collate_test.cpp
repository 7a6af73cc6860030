// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/collate.hpp"

#include <ATen/ATen.h>

#include <vector>

#include "catch.hpp"
#include "core/check.hpp"

namespace {

using qlorapp::Batch;
using qlorapp::Example;

at::Tensor longs(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

/// Ragged rows in a (B, T) grid as Hugging Face's collators make them.
struct Padded {
  at::Tensor ids, mask, labels;
  std::vector<Example> rows;
};

Padded padded(const std::vector<int64_t>& lengths, int64_t columns, bool left) {
  const auto rows = static_cast<int64_t>(lengths.size());
  Padded out{
      at::zeros({rows, columns}, at::kLong), at::zeros({rows, columns}, at::kLong), at::full({rows, columns}, -100, at::kLong), {}};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t length = lengths[static_cast<std::size_t>(r)], begin = left ? columns - length : 0;
    Example example;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t id = 10 * r + i + 1, label = (r + i) % 3 == 0 ? -100 : id;
      out.ids[r][begin + i] = id;
      out.mask[r][begin + i] = 1;
      out.labels[r][begin + i] = label;
      example.input_ids.push_back(static_cast<int32_t>(id));
      example.labels.push_back(static_cast<int32_t>(label));
    }
    out.rows.push_back(example);
  }
  return out;
}

void require_same(const Batch& a, const Batch& b) {
  REQUIRE(at::equal(a.tokens, b.tokens));
  REQUIRE(at::equal(a.targets, b.targets));
  REQUIRE(at::equal(a.positions, b.positions));
  REQUIRE(a.row_starts == b.row_starts);
  REQUIRE(a.target_count == b.target_count);
  REQUIRE(a.first_label_count == b.first_label_count);
}

}  // namespace

TEST_CASE("collate lays rows end to end and shifts targets inside each row") {
  const std::vector<Example> examples{{{5, 6, 7}, {5, -100, 7}, 1}, {{8}, {8}, 2}, {{9, 10}, {-100, 10}, 3}};
  const Batch batch = qlorapp::collate(examples, std::vector<int64_t>{2, 0, 1});
  REQUIRE(at::equal(batch.tokens, longs({9, 10, 5, 6, 7, 8})));
  REQUIRE(at::equal(batch.targets, longs({10, -100, -100, 7, -100, -100})));
  REQUIRE(at::equal(batch.positions, longs({0, 1, 0, 1, 2, 0})));
  REQUIRE(batch.row_starts == std::vector<int64_t>{0, 2, 5, 6});
  REQUIRE(batch.target_count == 2);
  REQUIRE(batch.first_label_count == 2);
  REQUIRE(batch.row_count() == 3);
  REQUIRE(batch.token_count() == 6);
  require_same(batch.to(at::kCPU), batch);
}

TEST_CASE("collate refuses rows that do not exist or do not fit") {
  const std::vector<Example> examples{{{1, 2}, {1, 2}, 1}, {{}, {}, 2}, {{1, 2}, {1}, 3}};
  for (const std::vector<int64_t>& rows : std::vector<std::vector<int64_t>>{{}, {-1}, {3}, {1}, {2}}) {
    REQUIRE_THROWS_AS(qlorapp::collate(examples, rows), qlorapp::ValueError);
  }
}

TEST_CASE("unpad takes what the mask shows, in the order of the grid, with Hugging Face's shift") {
  for (const bool left : {false, true}) {
    const Padded grid = padded({3, 1, 7, 5}, 7, left);
    const auto out = qlorapp::unpad(grid.ids, grid.mask, grid.labels);
    require_same(out.batch, qlorapp::collate(grid.rows));
    // The oracle: labels shifted in the grid, then selected.
    const at::Tensor shifted = at::constant_pad_nd(grid.labels, {0, 1}, -100).slice(1, 1);
    const at::Tensor selected = shifted.masked_select(grid.mask == 1);
    REQUIRE(at::equal(out.batch.targets, selected));
    REQUIRE(at::equal(grid.ids.flatten().index_select(0, out.indices), out.batch.tokens));
    REQUIRE(out.ignored_padding_labels == 0);
    // And back.
    REQUIRE(at::equal(out.pad(out.batch.tokens), grid.ids));
    const at::Tensor hidden = at::randn({16, 4}), grid_hidden = out.pad(hidden, -1.0);
    REQUIRE(grid_hidden.sizes() == at::IntArrayRef{4, 7, 4});
    REQUIRE(at::equal(grid_hidden.masked_select((grid.mask == 1).unsqueeze(-1)).view({16, 4}), hidden));
    REQUIRE((grid_hidden == -1.0).sum().item<int64_t>() == 12 * 4);
  }
}

TEST_CASE("unpad never trains on padding, and counts the labels that asked for it") {
  const Padded grid = padded({2, 4}, 4, false);
  const auto out = qlorapp::unpad(grid.ids, grid.mask, grid.ids);  // labels = input_ids, as the usual loop has it
  REQUIRE(out.ignored_padding_labels == 2);
  REQUIRE(at::equal(out.batch.targets, longs({2, -100, 12, 13, 14, -100})));
  REQUIRE(out.batch.target_count == 4);
}

TEST_CASE("unpad learns an EOS that was masked as padding, and nothing behind it") {
  const at::Tensor ids = longs({5, 6, 9, 9, 9, 5, 6, 7, 8, 9, 5, 9, 9, 9, 9}).view({3, 5});  // 9: EOS, and the padding
  const at::Tensor labels = longs({-100, 6, 9, -100, -100, -100, -100, 7, 8, 9, 5, -100, -100, -100, -100}).view({3, 5});
  const auto out = qlorapp::unpad(ids, ids.ne(9), labels);
  REQUIRE(out.ignored_padding_labels == 0);
  REQUIRE(at::equal(out.batch.tokens, longs({5, 6, 9, 5, 6, 7, 8, 9, 5})));
  REQUIRE(at::equal(out.batch.targets, longs({6, 9, -100, -100, 7, 8, 9, -100, -100})));
  REQUIRE(at::equal(out.indices, longs({0, 1, 2, 5, 6, 7, 8, 9, 10})));
  // Labels that are copies of the tokens stand on padding, row by row: what else is in a batch changes none.
  REQUIRE(qlorapp::unpad(ids, ids.ne(9), ids).ignored_padding_labels == 7);
  REQUIRE(qlorapp::unpad(ids, ids.ne(9), ids).batch.target_count == 5);
}

TEST_CASE("unpad without mask or labels takes every token and has no target") {
  const at::Tensor ids = at::arange(6, at::kInt).view({2, 3});
  const auto out = qlorapp::unpad(ids);
  REQUIRE(at::equal(out.batch.tokens, longs({0, 1, 2, 3, 4, 5})));
  REQUIRE(out.batch.row_starts == std::vector<int64_t>{0, 3, 6});
  REQUIRE(out.batch.target_count == 0);
}

TEST_CASE("unpad refuses masks with holes, rows of padding and other kinds of tensors") {
  const at::Tensor ids = at::ones({1, 4}, at::kLong);
  const auto mask = [](std::vector<int64_t> values) { return longs(std::move(values)).view({1, 4}); };
  REQUIRE_THROWS_AS(qlorapp::unpad(ids, mask({1, 0, 1, 1})), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::unpad(ids, mask({0, 0, 0, 0})), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::unpad(ids, mask({1, 2, 1, 0})), qlorapp::ValueError);
  REQUIRE_NOTHROW(qlorapp::unpad(ids, mask({0, 1, 1, 0})));
  REQUIRE_THROWS_AS(qlorapp::unpad(ids, at::ones({1, 3}, at::kLong)), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::unpad(ids.squeeze(0)), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::unpad(ids.to(at::kFloat)), qlorapp::TypeError);
  REQUIRE_NOTHROW(qlorapp::unpad(ids, ids.to(at::kBool)));
  REQUIRE_THROWS_AS(qlorapp::unpad(ids).pad(at::ones({3})), qlorapp::ValueError);
}
