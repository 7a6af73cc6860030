// SPDX-License-Identifier: Apache-2.0
/// A tokenizer as a GGUF file holds it. Torch-free.
///
/// llama.cpp has its splits of text by name, so a tokenizer.json must have one of those; byte-level BPE has its merges as pairs, BPE of
/// characters a score for each token, by which its merges are found. Sources: llama.cpp's llama-vocab.cpp and conversion/base.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

struct GgufVocabulary {
  std::string model;                ///< tokenizer.ggml.model: "gpt2" (byte-level) or "llama" (characters).
  std::string pre;                  ///< tokenizer.ggml.pre: the split of text.
  std::vector<std::string> tokens;  ///< As many as the embedding has rows.
  std::vector<float> scores;        ///< Of "llama", else empty.
  std::vector<int32_t> types;       ///< 1 normal, 2 unknown, 3 control, 4 added, 5 unused, 6 a byte.
  std::vector<std::string> merges;  ///< Of "gpt2", else empty.
  bool adds_bos = false, adds_eos = false;
  bool adds_space = false;  ///< In front of a text. Of "llama".
  std::optional<TokenId> bos, eos, pad, unknown;
  std::vector<TokenId> other_ends;  ///< Beside eos, any of them ends an answer.
};

/// @param folder  with tokenizer.json.  @param model_folder  with config.json and generation_config.json.
/// @param rows    of the embedding. Those without a token get a name that no text has.
/// @param chat    the template that conversations have; null: none. The token that ends its turns is an end of answers, and where it begins
///                without bos_token none is added.
/// @throws FormatError as Tokenizer::from_folder; for what llama.cpp has no name for, naming component and rule.
[[nodiscard]] GgufVocabulary gguf_vocabulary(const std::string& folder, const std::string& model_folder, int64_t rows,
                                             const ChatTemplate* chat);

/// Files of a folder.
struct TokenizerTexts {
  std::string tokenizer;  ///< tokenizer.json.
  std::string config;     ///< tokenizer_config.json.
};
/// The tokenizer that llama.cpp makes of a vocabulary, for Hugging Face's engine and ours.
/// @param where  names the file in messages.  @throws FormatError naming the key for a model or split that is not known, lists whose lengths
///         differ, an id that is no token's, a merge of something else than two tokens.
[[nodiscard]] TokenizerTexts tokenizer_texts(const GgufVocabulary& vocabulary, const std::string& where);

}  // namespace qlorapp
