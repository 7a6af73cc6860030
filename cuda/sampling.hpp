// SPDX-License-Identifier: Apache-2.0
/// The next token's choice from a row's scores, without sorting the vocabulary. A CTA a row.
///
/// A token's weight is exp(score − the row's largest) · 2⁴⁰, rounded down to an integer: sums are exact, in any order, and two runs have the same bits.
/// A token of weight 0 is never drawn. Rows with a NaN or +inf, and of −inf alone, are left as they are.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// Scores that leave become −inf: those below the top_k largest (0: none), then those that follow the smallest set whose weight reaches top_p of what
/// is left (of equal scores those of low index leave first; one token stays), then those of probability below min_p times the largest.
/// @param scores  (rows, vocabulary) contiguous; vocabulary up to 2^23, so that weights sum in 64 bits.
cudaError_t keep_likely_tokens(float* scores, int64_t rows, int64_t vocabulary, int64_t top_k, double top_p, double min_p,
                               Stream stream);

/// The first token whose weight and those of lower indices sum to more than the row's share `draws` of all; 0 in a row that has no weights.
/// @param scores  as above.  @param draws  (rows) in [0, 1).
cudaError_t draw_tokens(const float* scores, int64_t rows, int64_t vocabulary, const double* draws, int64_t* tokens, Stream stream);

}  // namespace qlorapp::cuda
