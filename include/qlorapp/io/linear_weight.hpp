// SPDX-License-Identifier: Apache-2.0
/// The weight of one linear layer between a checkpoint and memory: dense, or in bitsandbytes' four-bit form.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/checkpoint_index.hpp"
#include "qlorapp/format/quant_state.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

/// A floating tensor of the given shape, in the file's dtype, on the CPU.
/// @throws FormatError naming file and tensor if it is missing, of another shape, or not floating.
[[nodiscard]] at::Tensor read_checked(const format::Checkpoint& checkpoint, const std::string& name,
                                      const std::vector<int64_t>& shape);

/// A four-bit weight of the given shape with its very codes and scales.
/// @throws FormatError as find_quantized_weight, or if a code book differs from the standard one, or a scale is not finite.
[[nodiscard]] QuantizedTensor read_quantized(const format::Checkpoint& checkpoint, const std::string& name,
                                             const std::vector<int64_t>& shape);

/// Quantizer::quantize with the name of the tensor in front of what it has to complain about.
[[nodiscard]] QuantizedTensor quantize_named(const Quantizer& quantizer, const at::Tensor& weight, const std::string& name);

/// The tensors that bitsandbytes stores for a four-bit weight, ready for write_tensors.
[[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> quantized_tensors(const std::string& name,
                                                                                const QuantizedTensor& weight);

/// Whether one of the names is the module's or its trailing part, cut at a dot.
[[nodiscard]] bool names_module(const std::vector<std::string>& names, const std::string& module);

}  // namespace qlorapp
