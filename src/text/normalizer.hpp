// SPDX-License-Identifier: Apache-2.0
/// The normalizer of a tokenizer.json: how text is changed between the added tokens. Torch-free.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "aligned_text.hpp"

namespace qlorapp {

struct TextStep {
  enum class Kind {
    kPrepend,  ///< Puts `content` in front of a text that is not empty.
    kReplace,  ///< Every `pattern` becomes `content`.
    kNfc,      ///< Unicode's normalization form C.
  };
  Kind kind;
  std::string pattern;
  std::string content;
};

class Normalizer {
 public:
  Normalizer() = default;
  explicit Normalizer(std::vector<TextStep> steps) : steps_(std::move(steps)) {}

  /// Whether the text comes out as it is, at a glance: true is certain.
  [[nodiscard]] bool keeps(std::string_view text) const;
  /// @throws ValueError where a hostile normalizer makes the text too long.
  [[nodiscard]] AlignedText apply(const Section& section) const;

 private:
  std::vector<TextStep> steps_;
};

}  // namespace qlorapp
