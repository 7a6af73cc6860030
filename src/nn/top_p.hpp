// SPDX-License-Identifier: Apache-2.0
/// Nucleus sampling without sorting the vocabulary, on a CPU.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace qlorapp {

/// The set that transformers' TopPLogitsWarper keeps of a row: tokens by falling score, those that have p of the probability, the one that reaches
/// p included; at least one. Of equal scores the higher index comes first; torch.sort has no such rule.
/// Source: Holtzman et al. 2020, arXiv:1904.09751 §3.1.
class TopP {
 public:
  TopP();
  /// @param scores  others become −infinity; none does where probabilities are NaN.  @param probabilities  their softmax.
  void keep(std::span<float> scores, std::span<const float> probabilities, double p);

 private:
  struct Token {
    float score;
    size_t index;
  };

  std::vector<double> mass_;    ///< Of the scores that begin with the same 16 bits; 0 between rows.
  std::vector<size_t> likely_;  ///< First those that can be in the set; as long as the longest row.
  std::vector<Token> tokens_;   ///< Of these, those of the group in which it ends.
};

}  // namespace qlorapp
