// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/collate.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/check.hpp"

namespace qlorapp {
namespace {

/// Collects rows token by token; the tensors are made once, at the end.
class BatchBuilder {
 public:
  explicit BatchBuilder(int64_t tokens) {
    tokens_.reserve(static_cast<std::size_t>(tokens));
    targets_.reserve(static_cast<std::size_t>(tokens));
    positions_.reserve(static_cast<std::size_t>(tokens));
  }

  /// token(i) and label(i) for i in [0, length).
  template <class Token, class Label>
  void add_row(int64_t length, const Token& token, const Label& label) {
    for (int64_t i = 0; i < length; ++i) {
      const int64_t target = i + 1 < length ? label(i + 1) : Batch::kIgnoredTarget;
      tokens_.push_back(token(i));
      targets_.push_back(target);
      positions_.push_back(i);
      batch_.target_count += target != Batch::kIgnoredTarget ? 1 : 0;
      if (i == 0 && label(i) != Batch::kIgnoredTarget) ++batch_.first_label_count;
    }
    batch_.row_starts.push_back(static_cast<int64_t>(tokens_.size()));
  }

  /// Before anything is on a device, where a wrong id could only become NaN.
  void check_vocabulary(int64_t size) const {
    for (const int64_t token : tokens_) {
      TORCH_CHECK_INDEX(
          token >= 0 && token < size,
          message("[unpad] token ids must be from 0 to {}, the vocabulary's last; got {}. Use the tokenizer of this model, "
                  "or a model whose embeddings were resized for it.",
                  size - 1, token));
    }
    for (const int64_t target : targets_) {
      TORCH_CHECK_INDEX(target == Batch::kIgnoredTarget || (target >= 0 && target < size),
                        message("[unpad] labels must be {} (ignored) or from 0 to {}, the vocabulary's last; got {}.",
                                int64_t{Batch::kIgnoredTarget}, size - 1, target));
    }
  }

  [[nodiscard]] Batch finish() {
    batch_.tokens = tensor(tokens_);
    batch_.targets = tensor(targets_);
    batch_.positions = tensor(positions_);
    return std::move(batch_);
  }

  static at::Tensor tensor(const std::vector<int64_t>& values) {
    return at::tensor(at::IntArrayRef(values), at::TensorOptions().dtype(at::kLong));
  }

 private:
  std::vector<int64_t> tokens_, targets_, positions_;
  Batch batch_{{}, {}, {}, {0}, 0, 0, 0};
};

/// @returns (B, T) int64 on the CPU. The caller keeps it while it reads.
at::Tensor host_grid(const at::Tensor& grid, const at::Tensor& like, const char* name) {
  QLORAPP_CHECK_TYPE(at::isIntegralType(grid.scalar_type(), true), "[unpad] {} must be integers; got {}. Convert it with .long().",
                     name, c10::toString(grid.scalar_type()));
  QLORAPP_CHECK_VALUE(grid.dim() == 2 && grid.sizes() == like.sizes(),
                      "[unpad] {} must have the shape (B, T) of input_ids, {}; got {}. Pass tensors of one batch.", name,
                      joined(like.sizes()), joined(grid.sizes()));
  return grid.to(at::kCPU, at::kLong).contiguous();
}

}  // namespace

Batch collate(std::span<const Example> examples, std::span<const int64_t> rows) {
  QLORAPP_CHECK_VALUE(!rows.empty(), "[collate] a batch must have a row; got none. Check the sampler.");
  int64_t total = 0;
  for (const int64_t row : rows) {
    QLORAPP_CHECK_VALUE(row >= 0 && row < static_cast<int64_t>(examples.size()),
                        "[collate] rows must be from 0 to {}; got {}. Check the sampler.",
                        static_cast<int64_t>(examples.size()) - 1, row);
    const Example& example = examples[static_cast<std::size_t>(row)];
    QLORAPP_CHECK_VALUE(!example.input_ids.empty() && example.labels.size() == example.input_ids.size(),
                        "[collate] a row must have tokens and one label per token; row {} has {} tokens and {} labels. Use label "
                        "-100 for tokens that are not trained.",
                        row, example.input_ids.size(), example.labels.size());
    total += static_cast<int64_t>(example.input_ids.size());
    if (example.row_lengths.empty()) continue;
    const bool whole =
        std::all_of(example.row_lengths.begin(), example.row_lengths.end(), [](int64_t length) { return length > 0; }) &&
        std::accumulate(example.row_lengths.begin(), example.row_lengths.end(), int64_t{0}) == std::ssize(example.input_ids);
    QLORAPP_CHECK_VALUE(
        whole, "[collate] row_lengths must be at least 1 each and sum to {}; row {} has {}. Give one length per row of the pack.",
        example.input_ids.size(), row, joined(example.row_lengths));
  }
  BatchBuilder builder(total);
  for (const int64_t row : rows) {
    const Example& example = examples[static_cast<std::size_t>(row)];
    int64_t begin = 0;
    const auto add_row = [&](int64_t length) {
      builder.add_row(
          length, [&](int64_t i) { return int64_t{example.input_ids[static_cast<std::size_t>(begin + i)]}; },
          [&](int64_t i) { return int64_t{example.labels[static_cast<std::size_t>(begin + i)]}; });
      begin += length;
    };
    if (example.row_lengths.empty()) add_row(static_cast<int64_t>(example.input_ids.size()));
    for (const int64_t length : example.row_lengths) add_row(length);
  }
  return builder.finish();
}

Batch collate(std::span<const Example> examples) {
  std::vector<int64_t> rows(examples.size());
  std::iota(rows.begin(), rows.end(), int64_t{0});
  return collate(examples, rows);
}

UnpaddedBatch unpad(const at::Tensor& input_ids, const at::Tensor& attention_mask, const at::Tensor& labels, int64_t vocab_size,
                    const at::Tensor& position_ids) {
  QLORAPP_CHECK_VALUE(input_ids.defined() && input_ids.dim() == 2 && input_ids.numel() > 0,
                      "[unpad] input_ids must be (B, T) with at least one token; got another shape. Add a batch dimension.");
  const at::Tensor ids = host_grid(input_ids, input_ids, "input_ids");
  const at::Tensor mask = attention_mask.defined() ? host_grid(attention_mask, input_ids, "attention_mask") : at::ones_like(ids);
  const at::Tensor wanted = labels.defined() ? host_grid(labels, input_ids, "labels") : at::full_like(ids, Batch::kIgnoredTarget);
  const bool one_for_all = position_ids.defined() && position_ids.dim() == 2 && position_ids.size(0) == 1;
  const at::Tensor places =
      position_ids.defined() ? host_grid(one_for_all ? position_ids.expand_as(input_ids) : position_ids, input_ids, "position_ids")
                             : at::Tensor();
  const int64_t* position = places.defined() ? places.const_data_ptr<int64_t>() : nullptr;
  UnpaddedBatch out;
  out.rows = ids.size(0);
  out.columns = ids.size(1);
  const auto* id = ids.const_data_ptr<int64_t>();
  const auto* present = mask.const_data_ptr<int64_t>();
  const auto* label = wanted.const_data_ptr<int64_t>();

  BatchBuilder builder(ids.numel());
  std::vector<int64_t> indices;
  for (int64_t row = 0; row < out.rows; ++row) {
    const int64_t start = row * out.columns, stop = start + out.columns;
    int64_t begin = start, end = stop;
    while (begin < stop && present[begin] == 0) ++begin;
    while (end > begin && present[end - 1] == 0) --end;
    QLORAPP_CHECK_VALUE(begin < end, "[unpad] a row must have a token; row {} is padding only. Leave it out.", row);
    int64_t on_padding = 0;
    for (int64_t i = start; i < stop; ++i) {
      const bool inside = i >= begin && i < end;
      QLORAPP_CHECK_VALUE(present[i] == (inside ? 1 : 0),
                          "[unpad] attention_mask must be 1 for a row's tokens, without gaps, and 0 for padding; row {} has {} at "
                          "{}. Masks with gaps are not supported.",
                          row, present[i], i - start);
      if (!inside && label[i] != Batch::kIgnoredTarget) ++on_padding;
    }
    // Where EOS is the padding, input_ids.ne(pad_token_id) hides the EOS that a row ends in, while its label asks to learn it. It is
    // learned from the last token that is seen. More labels on padding say that they are copies of the tokens.
    if (on_padding == 1 && end < stop && label[end] != Batch::kIgnoredTarget) {
      ++end;
      on_padding = 0;
    }
    out.ignored_padding_labels += on_padding;
    for (int64_t i = begin; i < end; ++i) indices.push_back(i);
    for (int64_t first = begin; first < end;) {
      int64_t last = first + 1;
      while (last < end && (!position || position[last] == position[last - 1] + 1)) ++last;
      QLORAPP_CHECK_VALUE(last == end || !attention_mask.defined(),
                          "[unpad] position_ids must grow by 1 per token if there is an attention_mask; row {} has {} after {}. "
                          "Pack rows without a mask.",
                          row, position[last], position[last - 1]);
      if (first > start && label[first] != Batch::kIgnoredTarget) ++out.ignored_first_labels;
      builder.add_row(
          last - first, [&](int64_t i) { return id[first + i]; }, [&](int64_t i) { return label[first + i]; });
      first = last;
    }
  }
  if (vocab_size > 0) builder.check_vocabulary(vocab_size);
  out.batch = builder.finish().to(input_ids.device());
  out.indices = BatchBuilder::tensor(indices).to(input_ids.device());
  return out;
}

at::Tensor UnpaddedBatch::pad(const at::Tensor& values, double fill) const {
  QLORAPP_CHECK_VALUE(values.dim() > 0 && values.size(0) == indices.numel(),
                      "[pad] values must have one row per token, {}; got shape {}. Pass what was computed from this batch.",
                      indices.numel(), joined(values.sizes()));
  std::vector<int64_t> flat = values.sizes().vec(), grid = flat;
  flat[0] = rows * columns;
  grid.erase(grid.begin());
  grid.insert(grid.begin(), {rows, columns});
  return at::full(flat, fill, values.options()).index_copy(0, indices, values).view(grid);
}

}  // namespace qlorapp
