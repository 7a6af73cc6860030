// SPDX-License-Identifier: Apache-2.0
/// A four-bit weight in a checkpoint, as bitsandbytes stores it and transformers, PEFT and vLLM read it.
///
/// For a weight W of n elements in b = ceil(n / blocksize) blocks the file holds
///
///     W                                       U8 (ceil(n / 2), 1)   two codes a byte, the even element in the high nibble
///     W.absmax                                F32 (b); with double quantization U8 (b)
///     W.quant_map                             F32 (16)              the code book
///     W.nested_absmax, W.nested_quant_map     F32 (ceil(b / nested_blocksize)), F32 (256)   with double quantization only
///     W.quant_state.bitsandbytes__nf4|fp4     U8                    JSON as json.dumps writes it, keys in this order:
///         quant_type, blocksize, dtype, shape[, nested_blocksize, nested_dtype, nested_offset]
///
/// Nothing in the JSON is believed: each size is computed from the shape and compared with the tensor that is there.
///
/// Source: bitsandbytes 0.50 `QuantState.as_dict(packed=True)`. Byte for byte in docs/formats/checkpoint.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "format/double_quant.hpp"
#include "format/tensor_files.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::format {

struct QuantState {
  QuantType quant_type = QuantType::kNf4;
  int64_t block_size = 64;
  Dtype dtype = Dtype::kBF16;  ///< Of the weight that was quantized: F32, F16 or BF16.
  std::vector<int64_t> shape;  ///< Of that weight.
  bool double_quant = false;
  int64_t nested_block_size = 256;
  float nested_offset = 0;

  [[nodiscard]] int64_t numel() const;
  [[nodiscard]] int64_t packed_bytes() const { return (numel() + 1) / 2; }
  [[nodiscard]] int64_t block_count() const { return (numel() + block_size - 1) / block_size; }
  [[nodiscard]] int64_t nested_block_count() const { return (block_count() + nested_block_size - 1) / nested_block_size; }
};

/// "nf4" or "fp4".
[[nodiscard]] std::string_view bitsandbytes_name(QuantType type);

/// The JSON text. @throws ValueError if a field is outside what the format allows.
[[nodiscard]] std::string quant_state_json(const QuantState& state);

/// @throws FormatError naming `where` and the key.
[[nodiscard]] QuantState parse_quant_state(std::string_view json, std::string_view where);

/// The tensors to write for a weight, in the order of the table above; the last one's content is quant_state_json().
[[nodiscard]] std::vector<TensorSpec> quantized_tensor_specs(const std::string& weight, const QuantState& state);

/// The parts of one four-bit weight in a checkpoint; sizes and dtypes agree with `state`.
struct QuantizedWeight {
  QuantState state;
  TensorLocation packed, absmax, quant_map;
  TensorLocation nested_absmax, nested_quant_map;  ///< Null without double quantization.
};

/// @returns whether the weight is stored in four bits, that is, has a quant_state.
[[nodiscard]] bool is_quantized(const TensorFiles& files, const std::string& weight);

/// Finds and checks all parts; reads only the JSON.
/// @throws FormatError naming the tensor: no or more than one quant_state, an unknown suffix or key, a part that is missing,
///         too short, too long or of another dtype.
[[nodiscard]] QuantizedWeight find_quantized_weight(const TensorFiles& files, const std::string& weight);

}  // namespace qlorapp::format
