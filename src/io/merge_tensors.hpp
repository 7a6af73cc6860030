// SPDX-License-Identifier: Apache-2.0
/// Of what each tensor of a merged checkpoint is made: by names and shapes, without values, for a base of any family.
///
/// Each tensor of the base is copied, dequantized, replaced by one that the adapter saved, or changed by the adapter's matrices. Names of
/// the adapter are those in memory, names of the base those on disk (stored_names.hpp). A weight whose shape is that of (B·A)ᵀ is stored as
/// (in, out): GPT-2's Conv1D, and every embedding.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "adapter_tensors.hpp"
#include "format/tensor_files.hpp"
#include "merged_folder.hpp"

namespace qlorapp {

struct MergedTensor {
  std::string name;  ///< As the base stores it.
  std::vector<int64_t> shape;
  format::Dtype dtype;          ///< Of the result.
  format::TensorLocation from;  ///< Its values before the adapter; null if they are stored in four bits under its name.
  std::string module = {};      ///< The adapter's name for it, if its matrices change it.
  const AdaptedModule* lora = nullptr;
  bool transposed = false;                          ///< Stored as (in, out).
  const format::TensorEntry* added_bias = nullptr;  ///< Of lora_B, for a bias.
  bool quantized_first = false;                     ///< As training did; set by who merges.

  [[nodiscard]] int64_t numel() const;
  [[nodiscard]] int64_t nbytes() const { return numel() * format::dtype_bits(dtype) / 8; }
  [[nodiscard]] bool is_copied() const {
    return from.tensor != nullptr && lora == nullptr && added_bias == nullptr && !quantized_first;
  }
};

struct MergedTensors {
  std::vector<MergedTensor> tensors;  ///< Sorted by name.
  bool separates_head = false;
  std::optional<int64_t> vocab_size;  ///< If the tables were resized.
};

/// Do two stored tensors have the same values?
using SameValues = std::function<bool(const format::TensorLocation& a, const format::TensorLocation& b)>;

/// @param dtype  of all floating tensors; none: of each its own, and the config's for weights in four bits.
/// @throws FormatError naming the tensor that does not fit, is missing or stands for several experts.
[[nodiscard]] MergedTensors merged_tensors(const format::TensorFiles& base, const BaseConfig& config, const AdapterFile& adapter,
                                           const AdapterTensors& parts, std::optional<format::Dtype> dtype, const SameValues& same);

/// The same of a base alone.
[[nodiscard]] MergedTensors base_tensors(const format::TensorFiles& base, const BaseConfig& config,
                                         std::optional<format::Dtype> dtype);

/// F16, BF16, F32 or F64.
[[nodiscard]] bool is_wide_float(format::Dtype dtype);

}  // namespace qlorapp
