// SPDX-License-Identifier: Apache-2.0
/// A model as ops::DecodePass computes it: the rows of its family and its layers' tensors, written down.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "ops/decode_pass.hpp"

namespace qlorapp {

class CausalLM;
class DecodeAdapters;
struct GenerationCache;

/// @param adapters  null: none are in use.  @param numbers  as make_decode_pass's, of as many rows as the pass has.
/// @returns null where the model's blocks, or this GPU, have no such pass: another dtype than bfloat16, weights that are not all of one four-bit
///          kind or not on the device, DoRA, norms over all heads as one, queries that have a factor by position.
[[nodiscard]] std::unique_ptr<ops::DecodePass> decode_pass_of(CausalLM& model, const DecodeAdapters* adapters,
                                                              const GenerationCache& cache, const at::Tensor& numbers);

}  // namespace qlorapp
