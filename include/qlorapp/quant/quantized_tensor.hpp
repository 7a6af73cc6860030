// SPDX-License-Identifier: Apache-2.0
/// A weight stored in four bits: the value type that travels between files, operators and layers.
///
/// The weight is flattened row by row and cut into blocks of `block_size` elements (the last may be short; a block may
/// straddle rows). A block stores its largest magnitude and, for each element, the index of the nearest entry of a
/// 16-entry code book scaled by it. Two codes share a byte, the even element in the high nibble.
/// With double quantization the block scales are stored in eight bits themselves:
///     scale[i] = dynamic_map[absmax[i]] * nested_absmax[i / nested_block_size] + nested_offset      (two roundings, fp32)
/// Of a GGUF file `packed` holds ggml's blocks, row by row, with their scales in them; then absmax has no elements.
///
/// Source: Dettmers et al. 2023, arXiv:2305.14314 §3; memory layout as in bitsandbytes' QuantState, so that files of either
/// load in the other. docs/formats/nf4.md and docs/formats/double_quant.md give every byte.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"
#include "qlorapp/format/nf4.hpp"  // QuantType

namespace qlorapp {

struct QuantizedTensor {
  at::Tensor packed;           ///< (ceil(n / 2), 1) uint8, two codes a byte.
  at::Tensor absmax;           ///< (blocks) float32 scales; with double quantization (blocks) uint8 codes of them.
  at::Tensor nested_absmax;    ///< (ceil(blocks / nested_block_size)) float32; undefined without double quantization.
  at::Tensor nested_offset;    ///< () float32, the mean of the scales; undefined without double quantization.
  std::vector<int64_t> shape;  ///< Of the weight: (out, in) for a linear layer.
  at::ScalarType dtype = at::ScalarType::Float;  ///< Of the weight that was quantized; the default for dequantizing.
  int64_t block_size = 64;                       ///< Elements a scale; 32, 64, … 4096.
  int64_t nested_block_size = 256;               ///< Scales a second-level scale.
  QuantType quant_type = QuantType::kNf4;

  [[nodiscard]] bool defined() const { return packed.defined(); }
  [[nodiscard]] bool double_quantized() const { return nested_absmax.defined(); }
  /// Number of elements of the weight.
  [[nodiscard]] int64_t numel() const;
  /// Bytes of all tensors together: 0.5 an element plus scales.
  [[nodiscard]] Bytes nbytes() const;
  /// The same weight on another device. Copies only what is not there yet.
  [[nodiscard]] QuantizedTensor to(at::Device device) const;
  /// The same weight in memory of its own.
  [[nodiscard]] QuantizedTensor clone() const;
  /// @throws ValueError naming the tensor, if a size or dtype contradicts shape, block sizes and quant_type. Everything
  ///         that was read from a file passes through here; operators trust it afterwards.
  void check(const std::string& name) const;
};

}  // namespace qlorapp
