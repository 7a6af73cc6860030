// SPDX-License-Identifier: Apache-2.0
/// One linear layer's weight with its adapter in it, as a plain weight.
///
///     W' = W + s·B·A                         with DoRA   W' = m / ‖W + s·B·A‖ ∘ (W + s·B·A), row by row
///
/// formed in float32 and rounded once, as PEFT's merge_and_unload does without safe_merge.
/// Run on tensors of the Meta device it takes what it takes on a CPU, so memory/planner.hpp asks this very function.
/// Source: Hu et al. 2021, arXiv:2106.09685 §4.1; Liu et al. 2024, arXiv:2402.09353 §4.1; PEFT's tuners/lora/layer.py.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "adapters/lora_projection.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

/// What a weight without an adapter goes through, piece by piece.
inline constexpr int64_t kMergeBufferBytes = int64_t{1} << 20;

/// @param weight     (out, in), four-bit or dense in any floating dtype. It is used up: a dense one in float32 becomes the result's
///                   memory, another one is freed as soon as it has been converted. Give the only reference.
/// @param adapter    added to it; null: none.
/// @param quantizer  for a dense weight: it is quantized by it and dequantized first; null: it stays as it is.
/// @param dtype      of the result: float32, bfloat16 or float16.
/// @returns (out, in) on the weight's device. Values that dtype cannot hold are inf.  @throws ValueError as Quantizer::quantize.
[[nodiscard]] at::Tensor merged_weight(FrozenWeight weight, const LoraAdapter* adapter, const Quantizer* quantizer,
                                       at::ScalarType dtype);

}  // namespace qlorapp
