// SPDX-License-Identifier: Apache-2.0
/// The tensors of a base with an adapter merged into it, or of a base alone: values are made when they are asked for, one at a time.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapter_file.hpp"
#include "adapter_tensors.hpp"
#include "format/tensor_files.hpp"
#include "io/stored_names.hpp"
#include "merge_tensors.hpp"
#include "merged_folder.hpp"
#include "qlorapp/adapters/lora_adapter.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/merge.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

class MergedModel {
 public:
  /// Looks at names and shapes. @param adapter  a PEFT folder; empty: none.  @throws as merge_adapter().
  MergedModel(const std::string& model, const std::string& adapter, const MergeOptions& options);

  [[nodiscard]] const MergedTensors& result() const { return result_; }
  [[nodiscard]] const format::TensorFiles& files() const { return files_; }
  /// Of the written weights, as config.json names it.
  [[nodiscard]] const std::string& dtype_name() const { return dtype_name_; }

  /// The tensor of this name in memory ("model.layers.0.self_attn.q_proj.weight"), however the files name it; null: none.
  [[nodiscard]] const MergedTensor* find(const std::string& name) const;
  /// What the adapter changes, as `output.dtype` or another. @throws FormatError for a value that is not finite in it; IoError.
  [[nodiscard]] at::Tensor merged(const MergedTensor& output, std::optional<at::ScalarType> dtype = std::nullopt) const;
  /// Any tensor; in float32 if the adapter changes it, else as it is stored. @throws as merged().
  [[nodiscard]] at::Tensor values(const MergedTensor& output) const;
  /// What it does not change, as `output.dtype`, in pieces of at most 1 MiB. @throws as merged().
  void read_pieces(const MergedTensor& output, const std::function<void(const at::Tensor&)>& take) const;
  /// @throws FormatError if a file is not as it was when it was opened.
  void check_unchanged() const;

 private:
  [[nodiscard]] format::Dtype main_dtype() const;
  [[nodiscard]] const std::string& stored_name(const format::Parameter& linear) const;
  [[nodiscard]] uint64_t fingerprint(const std::string& model) const;
  void quantize_first(const std::string& model);
  [[nodiscard]] QuantizedTensor read_quantized(const std::string& name, const std::vector<int64_t>& shape) const;
  [[nodiscard]] LoraAdapter read_adapter(const MergedTensor& output) const;
  [[nodiscard]] at::Tensor merged_values(const MergedTensor& output, at::ScalarType dtype) const;

  format::TensorFiles files_;
  BaseConfig config_;
  std::optional<AdapterFile> adapter_;
  AdapterTensors parts_;
  const MergeOptions& options_;
  Quantizer quantizer_;
  StoredNames stored_names_;
  MergedTensors result_;
  std::optional<StoredNames> names_;  ///< Of the result.
  std::string dtype_name_;
};

}  // namespace qlorapp
