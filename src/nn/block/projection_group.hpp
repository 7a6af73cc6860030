// SPDX-License-Identifier: Apache-2.0
/// The linear layers of a block that share an input: multiplied as one (in 16 or in eight bits), or each on its own. Forward and
/// backward with their adapters.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/block/block_data.hpp"
#include "nn/decode_adapters.hpp"
#include "nn/float8_stack.hpp"
#include "nn/projection_stack.hpp"
#include "nn/step_context.hpp"

namespace qlorapp {

class ProjectionGroup {
 public:
  /// s·dy·B of each layer, in tensors of their own; undefined where they are in columns behind dy.
  using Inner = std::vector<at::Tensor>;

  /// @param data  kept by reference.
  ProjectionGroup(const BlockData& data, format::Group group);

  [[nodiscard]] size_t begin() const { return begin_; }  ///< The slot of its first layer.
  [[nodiscard]] size_t size() const { return count_; }
  [[nodiscard]] bool has_adapter() const;
  /// Columns that a matrix which this group's products read or write carries behind its own. 0 unless stacked.
  [[nodiscard]] int64_t spare(const StepContext& context) const;

  /// y = x·Wᵀ + bias with LoRA.
  /// @param u  takes each layer's x·Aᵀ for backward; empty: none is wanted.
  /// @param workspace  null: dequantized for this call. Else taken from there if it is defined, and put there.
  void project(at::Tensor y, const Wide& x, const StepContext& context, std::span<at::Tensor> u,
               at::Tensor* workspace = nullptr) const;
  /// Whether u is there for each layer that has an adapter.
  [[nodiscard]] bool has_inputs(std::span<const at::Tensor> u) const;
  /// u alone, where a recompute stops before this group's product.
  /// @param workspace  what project_back() used; undefined unless stacked in 16 bits.
  void form_inputs(const at::Tensor& x, const StepContext& context, std::span<at::Tensor> u, const at::Tensor& workspace) const;
  /// Dequantized with the adapters beside, if this context multiplies so; else undefined.
  [[nodiscard]] at::Tensor workspace(const StepContext& context, at::ScalarType dtype) const;
  /// The half of backward that needs no input: dx (unless null) from dy. @param workspace  undefined: dequantized here.
  [[nodiscard]] Inner project_back(at::Tensor* dx, const Wide& dy, const StepContext& context, const at::Tensor& workspace) const;
  /// The other half, after it: the adapters' gradients. @param v  what project_back returned.
  void add_gradients(const Wide& dy, const at::Tensor& x, const Inner& v, const StepContext& context, std::span<const at::Tensor> u,
                     std::span<const LoraGradients> gradients) const;

 private:
  /// project() where StepContext::few is set.
  void project_few(at::Tensor y, const at::Tensor& x, const StepContext& context) const;
  bool multiply_group(at::Tensor& y, const at::Tensor& x, std::span<const FrozenWeight> all,
                      std::span<const std::optional<DecodeAdapter>> adapters, const at::Tensor& a) const;
  [[nodiscard]] ProjectionStack stack(const StepContext& context) const;
  [[nodiscard]] Float8Stack float8_stack(const StepContext& context) const;
  [[nodiscard]] std::span<const FrozenWeight> weights(const StepContext& context) const;
  [[nodiscard]] std::span<const std::optional<LoraAdapter>> adapters() const;
  [[nodiscard]] const LoraAdapter* adapter(size_t i) const;
  [[nodiscard]] std::optional<DropoutKey> dropout(size_t i, const StepContext& context) const;
  [[nodiscard]] const at::Tensor& bias() const { return data_.biases[static_cast<size_t>(group_)]; }

  const BlockData& data_;
  format::Group group_;
  size_t begin_ = 0, count_ = 0;
};

}  // namespace qlorapp
