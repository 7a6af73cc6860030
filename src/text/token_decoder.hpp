// SPDX-License-Identifier: Apache-2.0
/// The decoder of a tokenizer.json: tokens as spelled in the file become text. Torch-free.
///
/// Source: Hugging Face tokenizers, decoders/ and pre_tokenizers/{byte_level,metaspace}.rs.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace qlorapp {

struct DecodeStep {
  enum class Kind {
    kByteLevel,     ///< GPT-2's alphabet back to bytes; the tokens become one text, with U+FFFD for what is no UTF-8.
    kMetaspace,     ///< `pattern` becomes a space; in the first token it is left out where `start` is not 0.
    kReplace,       ///< Every `pattern` becomes `content`.
    kByteFallback,  ///< Runs of tokens "<0x41>" become their bytes, or one U+FFFD each where these are no UTF-8.
    kFuse,          ///< The tokens become one text.
    kStrip,         ///< Takes up to `start` times `pattern`, one character, from the front and up to `stop` from the end.
  };
  Kind kind;
  std::string pattern = {};
  std::string content = {};
  std::size_t start = 0, stop = 0;
};

class TokenDecoder {
 public:
  TokenDecoder() = default;
  explicit TokenDecoder(std::vector<DecodeStep> steps) : steps_(std::move(steps)) {}

  /// @returns UTF-8.
  [[nodiscard]] std::string decode(std::vector<std::string> tokens) const;

  /// @returns the byte that "<0x41>" stands for, or -1 for every other token.
  [[nodiscard]] static int byte_of(std::string_view token);
  /// The inverse of byte_of.
  [[nodiscard]] static std::string token_of(uint8_t byte);

 private:
  std::vector<DecodeStep> steps_;
};

}  // namespace qlorapp
