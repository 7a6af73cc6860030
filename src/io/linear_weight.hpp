// SPDX-License-Identifier: Apache-2.0
/// The weight of one linear layer between a checkpoint and memory: dense, or in bitsandbytes' four-bit form. What stands in the
/// files' headers is checked at once, before anything is read; the weights themselves come with stream_tensors.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapters/adapter_set.hpp"
#include "format/quant_state.hpp"
#include "format/tensor_files.hpp"
#include "io/tensor_stream.hpp"
#include "nn/block_weights.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

/// Where a floating tensor of the given shape stands.
/// @throws FormatError naming file and tensor if it is missing, of another shape, or not floating.
[[nodiscard]] format::TensorLocation find_checked(const format::TensorFiles& files, const std::string& name,
                                                  const std::vector<int64_t>& shape);

/// The form of a weight that is stored in four bits.
/// @throws FormatError as find_quantized_weight, or if it has another shape.
[[nodiscard]] WeightForm stored_form(const format::TensorFiles& files, const std::string& name, const std::vector<int64_t>& shape);

/// A four-bit weight with its very codes and scales, into places of its form: complete once stream_tensors has moved what is added to
/// `tensors`, and then `done` is called.
/// @throws FormatError as find_quantized_weight, or if a code book differs from the standard one, or a scale is not finite (those of a
///         weight without double quantization are looked at when they are there).
void stream_quantized(std::vector<StreamedTensor>& tensors, const format::TensorFiles& files, const std::string& name,
                      const QuantizedTensor& places, std::function<void()> done);
/// The same into memory of its own on the CPU. @throws FormatError as stored_form, too.
[[nodiscard]] QuantizedTensor stream_quantized(std::vector<StreamedTensor>& tensors, const format::TensorFiles& files,
                                               const std::string& name, const std::vector<int64_t>& shape);

/// A dense weight that is quantized as it comes; `done` gets the result.
/// @throws FormatError as find_checked; later, through stream_tensors, with the name of the tensor in front of what the
/// quantizer
///         has to complain about.
void stream_and_quantize(std::vector<StreamedTensor>& tensors, const format::TensorFiles& files, const std::string& name,
                         const std::vector<int64_t>& shape, const Quantizer& quantizer, std::function<void(QuantizedTensor)> done);

/// The tensors that bitsandbytes stores for a four-bit weight, ready for write_tensors. @throws ValueError for one in ggml's blocks.
[[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> quantized_tensors(const std::string& name,
                                                                                const QuantizedTensor& weight);

/// The other way: a weight around copies of these tensors, by the names that quantized_tensors gives; on the device of `name`.
/// @throws FormatError naming `where` and the tensor: as find_quantized_weight, and for a code book that is not the standard one
///         or a scale that is not finite. Synchronizes.
[[nodiscard]] QuantizedTensor quantized_of_tensors(const std::map<std::string, at::Tensor>& tensors, const std::string& name,
                                                   const std::string& where);

/// Float weights of a folder's linear layers, read one by one when they are asked for; the folder is opened at the first.
/// Undefined for a weight that is stored in four bits.
[[nodiscard]] WeightSource checkpoint_weights(std::string folder);

}  // namespace qlorapp
