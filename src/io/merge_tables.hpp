// SPDX-License-Identifier: Apache-2.0
/// Embedding and head of a merged model: one table or two.
///
/// A base without a head's tensor has one table for both. An adapter may part them (modules_to_save or matrices of one of the two), train
/// them as one (ensure_weight_tying), or bring a larger table (new tokens). A base whose config.json ties two tables of other values has
/// two, as transformers 5.23 reads it.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "merge_tensors.hpp"

namespace qlorapp {

class MergeTables {
 public:
  /// Looks for the tables. If there is an embedding alone, adds the head as another tensor of the same values.
  MergeTables(std::vector<MergedTensor>& tensors, const BaseConfig& config, const AdapterFile& adapter, const AdapterTensors& parts,
              const SameValues& same);

  /// After saved tensors took their places: a tied table that was saved, and not as a separate one, is both.
  void share_saved();
  /// After matrices did: removes a head that is the embedding still.
  /// @throws FormatError if the tables have different rows, or two of an adapter that ties them differ.
  void settle(MergedTensors& result);

 private:
  [[nodiscard]] MergedTensor& embedding() const { return tensors_[*embedding_]; }
  [[nodiscard]] MergedTensor& head() const { return tensors_[*head_]; }
  [[nodiscard]] bool is_one_table() const;

  std::vector<MergedTensor>& tensors_;
  const BaseConfig& config_;
  const AdapterFile& adapter_;
  const SameValues& same_;
  std::optional<size_t> embedding_, head_;
  int64_t rows_ = 0;       ///< Before.
  bool added_ = false;     ///< The head has no tensor in the base.
  bool differed_ = false;  ///< The base has two tables, other than its config.json says.
};

}  // namespace qlorapp
