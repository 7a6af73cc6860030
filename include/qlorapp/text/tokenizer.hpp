// SPDX-License-Identifier: Apache-2.0
/// Text to token ids and back for BPE, read from a Hugging Face tokenizer.json. Torch-free.
///
/// Two kinds are known, and what files are made of:
///   byte-level (Llama 3, Qwen, Mistral with Tekken, Phi-4, Granite, OLMo, GLM-4, DeepSeek, Hunyuan, SmolLM, GPT-2): a token for every
///     byte; pre-tokenizers ByteLevel, Digits and Split with a pattern of the kind that is published (src/text/split_pattern.hpp);
///     normalizer NFC; decoder ByteLevel
///   of characters (Llama 2, TinyLlama, Mistral, Phi-3, Gemma): byte_fallback, unk_token and fuse_unk; normalizers Prepend,
///     Replace of a string and NFC; pre-tokenizers Metaspace, Digits and Split on a character; decoders Replace, ByteFallback,
///     Fuse, Strip and Metaspace
/// and in both: added tokens with all their flags, merges as pairs or strings, post-processors TemplateProcessing and ByteLevel.
/// Ids, and the characters that ranges touch, equal those of the tokenizers package on every text. What a file has beyond that
/// is refused by name, never approximated. tokenizer.json is what counts: transformers 5 rebuilds some tokenizers from their
/// class name (LlamaTokenizer ignores the normalizer of the file), which changes spaces at the start of a text.
/// Formats and order of operations: Hugging Face tokenizers 0.23 (added_vocabulary, normalizer, pre_tokenizers, models/bpe,
/// decoders); the byte alphabet: GPT-2's encoder.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

using TokenId = int32_t;

/// Half-open range of bytes of a UTF-8 text.
struct TextRange {
  std::size_t begin = 0, end = 0;
  friend bool operator==(const TextRange&, const TextRange&) = default;
};

struct Encoding {
  std::vector<TokenId> ids;
  /// The bytes of the given text that each token stands for; empty at an end of the text for special tokens put there. What a
  /// normalizer puts in front of a text belongs to its first character, so the ranges of two tokens can overlap there.
  std::vector<TextRange> ranges;
};

/// A value: copies share the tables. All members are const and may be called from several threads.
class Tokenizer {
 public:
  /// Reads tokenizer.json (at most 64 MB) and, where they exist, tokenizer_config.json, special_tokens_map.json, config.json
  /// and generation_config.json, which name the special tokens.
  /// @param model_folder  the model that the tokenizer of an adapter's folder belongs to: the last two files stand there.
  /// @throws IoError, FormatError with the file and the component at fault.
  [[nodiscard]] static Tokenizer from_folder(const std::string& folder, const std::string& model_folder = "");

  /// From the text of a tokenizer.json; bos, eos and pad are then unknown. `where` stands in messages.
  [[nodiscard]] static Tokenizer from_json(std::string_view text, const std::string& where = "tokenizer.json");

  /// @param add_special_tokens  puts the post-processor's tokens (Llama 2: `<s>`) around the text. Added tokens inside the text are
  ///                            found either way.
  /// @throws ValueError for ill-formed UTF-8, naming the offset, for text of 1 GiB or more, and for what has no token where the
  ///         file has no unknown token.
  [[nodiscard]] std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = true) const;
  /// The same, with the bytes of the text that each token stands for.
  /// @param most  tokens are returned: the first ones. The text behind them is not looked at.
  /// @throws ValueError also for a part of the text that the pre-tokenizer does not divide and that has more than 2 MiB, and for text of
  ///         more than 8 MiB that the normalizer changes: both take many bytes of memory for each.
  [[nodiscard]] Encoding encode_with_ranges(std::string_view text, bool add_special_tokens = true,
                                            std::size_t most = SIZE_MAX) const;

  /// UTF-8; bytes that form no character become U+FFFD. Ids without a token are left out, as Hugging Face does. The start of a
  /// text may be special (Llama 2 removes a space from it): decode a whole text, not its parts.
  [[nodiscard]] std::string decode(std::span<const TokenId> ids, bool skip_special_tokens = false) const;

  /// As spelled in the file ("Ġthe", "<|eot_id|>").
  [[nodiscard]] std::optional<TokenId> token_to_id(std::string_view token) const;
  /// @returns nullopt for an id without a token.
  [[nodiscard]] std::optional<std::string> id_to_token(TokenId id) const;
  /// Whether decode() leaves it out when special tokens are skipped.
  [[nodiscard]] bool is_special(TokenId id) const;
  /// The texts of these tokens, in no order.
  [[nodiscard]] std::vector<std::string> special_tokens() const;

  /// Number of tokens, added ones included. The rows of the embedding may be more.
  [[nodiscard]] int64_t vocab_size() const;
  /// One more than the largest id: what an embedding must have at least.
  [[nodiscard]] int64_t id_limit() const;

  /// nullopt: the model has none.
  [[nodiscard]] std::optional<TokenId> bos_id() const;
  [[nodiscard]] std::optional<TokenId> eos_id() const;
  [[nodiscard]] std::optional<TokenId> pad_id() const;
  /// All tokens that end a generation: eos_id() first, then those of generation_config.json and config.json.
  [[nodiscard]] const std::vector<TokenId>& eos_ids() const;

 private:
  struct Tables;
  explicit Tokenizer(std::shared_ptr<const Tables> tables);
  std::shared_ptr<const Tables> tables_;
};

}  // namespace qlorapp
