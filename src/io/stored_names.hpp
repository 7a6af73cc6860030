// SPDX-License-Identifier: Apache-2.0
/// Tensors of a checkpoint by the names that their modules have in memory.
///
/// transformers 5 renames the wrappers of a module when it loads a checkpoint: "language_model.model.layers.0.…" on disk is
/// "model.language_model.layers.0.…" in memory, and adapters have the names in memory. Two names are of one module if they are equal from
/// the layer's list on, or in their last two words if no layer is named, and what stands before differs in order and wrappers alone.
/// Source: transformers 5.23, conversion_mapping.py.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

inline constexpr std::string_view kWeightSuffix = ".weight";

/// "model.layers.3.self_attn.q_proj.weight" is "model" and "layers.3.self_attn.q_proj.weight".
struct SplitName {
  std::string_view wrappers, tail;
};
[[nodiscard]] SplitName split_name(std::string_view name);
/// Numbers between dots.
[[nodiscard]] size_t count_numbers(std::string_view name);

class StoredNames {
 public:
  /// @param names  of tensors, as the files have them.
  explicit StoredNames(std::vector<std::string> names);

  /// @returns the stored name of a tensor, or nullptr. @throws FormatError if several fit equally well.
  [[nodiscard]] const std::string* find(const std::string& name) const;

 private:
  std::vector<std::string> names_;
  std::multimap<std::string, size_t, std::less<>> by_tail_;
};

}  // namespace qlorapp
