// SPDX-License-Identifier: Apache-2.0
/// Unicode's normalization form C (UAX #15), as the normalizer of Hugging Face's tokenizers computes it. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aligned_text.hpp"

namespace qlorapp {
namespace unicode {

/// Code points of a combining class that is not 0.
struct CombiningRange {
  uint32_t first, last;
  uint8_t combining_class;
};
extern const CombiningRange kCombiningRanges[];  ///< Sorted, disjoint.
extern const std::size_t kCombiningRangeCount;

/// One step of a canonical decomposition; Hangul syllables are computed.
struct Decomposition {
  uint32_t code_point, first;
  uint32_t second = 0;   ///< 0: there is none.
  uint8_t composes = 0;  ///< Whether NFC puts the two together again.
};
extern const Decomposition kDecompositions[];  ///< Sorted.
extern const std::size_t kDecompositionCount;

}  // namespace unicode

/// Puts `text` into NFC. A composed character comes from the first of its parts. Time is linear but for runs of combining marks,
/// which are sorted.
void to_nfc(AlignedText& text);

}  // namespace qlorapp
