// SPDX-License-Identifier: Apache-2.0
/// Quantizer::Options from Python's words.
#pragma once

#include <string>

#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp::python {

/// @param quant_type  "nf4" or "fp4".  @param compat  "none" or "bnb".  @throws ValueError naming the one that is neither.
[[nodiscard]] Quantizer::Options quantizer_options(const std::string& quant_type, int64_t block_size, bool double_quant,
                                                   int64_t nested_block_size, const std::string& compat);

}  // namespace qlorapp::python
