// SPDX-License-Identifier: Apache-2.0
/// Rows of numbers in ggml's blocks. Torch-free.
///
///     Q8_0   32 elements   d·q                     d in float16, q from -127 to 127
///     Q4_0   32            d·(q - 8)               q from 0 to 15
///     Q4_1   32            d·q + m                 q from 0 to 15
///     Q5_0   32            d·(q - 16)              q from 0 to 31
///     Q5_1   32            d·q + m                 q from 0 to 31
///     Q4_K   256 = 8·32    d·s·q - e·m             d, e in float16, s and m of each 32 from 0 to 63, q from 0 to 15
///     Q5_K   256 = 8·32    the same, q from 0 to 31
///     Q6_K   256 = 16·16   d·s·(q - 32)            s of each 16 in eight bits, q from 0 to 63
/// Scales (and mins) are those of the least squared error that a search around the largest element finds: each candidate is followed by the
/// scale that is the best for the integers it gives. Where scales are integers themselves, the neighbors of the nearest are tried. With `importance`
/// squares are weighted, by element of a row.
///
/// Layout of the blocks: ggml's ggml-common.h and gguf 0.19's quants.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "gguf.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::format {

/// To Q8_0, Q4_0, Q4_K, Q5_K or Q6_K.
/// @param row         finite; a whole number of blocks.
/// @param importance  as many weights, none negative; empty: all 1.
/// @param into        row.size() / elements · bytes of the type's block.
void quantize_row(GgufType type, std::span<const float> row, std::span<const float> importance, std::span<std::byte> into);

/// ggml's number of a type that has no code book.
[[nodiscard]] GgufType gguf_type_of(QuantType type);
/// The other way; nothing for types without blocks.
[[nodiscard]] std::optional<QuantType> quant_type_of(GgufType type);

/// Of a type with blocks. @param from  whole blocks.
[[nodiscard]] bool scales_are_finite(GgufType type, std::span<const std::byte> from);

/// Of any type, with the bits of gguf 0.19's own dequantizers. @param from  whole blocks.  @param into  their elements.
void dequantize_row(GgufType type, std::span<const std::byte> from, std::span<float> into);

}  // namespace qlorapp::format
