// SPDX-License-Identifier: Apache-2.0
/// Cuts text into the pieces that byte-pair merges may not cross. Torch-free.
///
/// The patterns of Llama 3, Qwen 2 and GPT-2 are written out by hand over the Unicode classes, one linear scan each; which one a
/// tokenizer.json means is decided by comparing its pattern string with pattern_of(). Others are read (split_pattern.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "split_pattern.hpp"
#include "unicode.hpp"

namespace qlorapp {

enum class Split {
  kLlama3,            ///< Llama 3: up to three digits a piece; contractions in any case.
  kQwen2,             ///< As Llama 3 with one digit a piece.
  kGpt2,              ///< GPT-2: contractions in lower case only; what ByteLevel(use_regex=true) does.
  kIndividualDigits,  ///< Digits(individual_digits=true): every numeric character alone.
  kContiguousDigits,  ///< Digits(individual_digits=false): runs of numeric characters.
  kBeforeDelimiter,   ///< Every delimiter begins a piece (MergedWithNext); what Metaspace(split=true) does.
  kAfterDelimiter,    ///< Every delimiter ends a piece (MergedWithPrevious).
  kAroundDelimiter,   ///< Every delimiter is a piece (Isolated).
  kBeforeRuns,        ///< Every run of delimiters begins a piece.
  kPattern,           ///< Every match of `pattern`, and what is between matches.
  kMatches,           ///< Every match of `pattern`; what is between them is dropped.
};

/// A split and what it needs: a delimiter, which is one code point, or a pattern.
struct SplitStep {
  Split split;
  uint32_t delimiter = 0;
  std::shared_ptr<const SplitPattern> pattern = nullptr;
};

/// @returns the regular expression that `split` is equal to, as files write it; empty for those that have none.
[[nodiscard]] std::string_view pattern_of(Split split);

/// Appends the pieces of text[begin, end), which cover it unless the step is kMatches. Look-ahead ends at `end`, as it does in a piece that an
/// earlier split has cut out.
void split_pieces(const SplitStep& step, const std::vector<unicode::CodePoint>& text, Piece range, std::vector<Piece>& out);
/// The same by all steps, one behind the other, for a text that goes on behind `text`: the pieces that do not depend on what follows, so that
/// a long text is split a window at a time. @returns the index behind the last of them, where the next window begins; 0: the window is too short.
[[nodiscard]] std::size_t split_window(const std::vector<SplitStep>& steps, const std::vector<unicode::CodePoint>& text,
                                       bool is_end, std::vector<Piece>& out);

}  // namespace qlorapp
