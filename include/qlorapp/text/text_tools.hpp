// SPDX-License-Identifier: Apache-2.0
/// The interface of a tokenizer and a chat template to rows of text. Both may run in this library or in another process. Torch-free.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

/// Both are opened when a row needs them, and not before: rows of input_ids need neither.
class TextTools {
 public:
  TextTools() = default;
  TextTools(const TextTools&) = delete;
  TextTools& operator=(const TextTools&) = delete;
  virtual ~TextTools() = default;

  /// Whether a tokenizer can be had without a word: for facts about rows that do not need one.
  [[nodiscard]] virtual bool has_tokenizer() = 0;
  /// Whether the model has a chat template. @throws FormatError as require_template(), for one that cannot be read.
  [[nodiscard]] virtual bool has_template() = 0;
  /// @param file  needs them; it stands in messages. @throws ValueError, FormatError or IoError where there is none.
  virtual void require_tokenizer(const std::string& file) = 0;
  virtual void require_template(const std::string& file) = 0;

  // With a tokenizer:
  /// @returns an Encoding whose ranges are empty where the tokenizer does not know them. @throws ValueError for text that it refuses.
  [[nodiscard]] virtual Encoding encode(std::string_view text, bool add_special_tokens) = 0;
  /// The first `most` tokens of the same. Here all are made, and cut.
  [[nodiscard]] virtual Encoding encode_beginning(std::string_view text, bool add_special_tokens, std::size_t most);
  /// As those of Tokenizer (tokenizer.hpp).
  [[nodiscard]] virtual std::string decode(std::span<const TokenId> ids, bool skip_special_tokens) = 0;
  [[nodiscard]] virtual std::optional<TokenId> token_to_id(std::string_view token) = 0;
  [[nodiscard]] virtual std::optional<TokenId> eos_id() = 0;
  /// All tokens that end a generation.
  [[nodiscard]] virtual const std::vector<TokenId>& eos_ids() = 0;
  [[nodiscard]] virtual int64_t id_limit() = 0;

  // With a template:
  /// @throws ValueError for a conversation that the template refuses.
  [[nodiscard]] virtual RenderedChat render(std::span<const Message> messages, const ChatOptions& options) = 0;
  /// Whether it looks at this key of a message.
  [[nodiscard]] virtual bool reads_key(std::string_view key) = 0;
  /// nullopt: unknown.
  [[nodiscard]] virtual std::optional<std::string> end_of_turn() = 0;
};

/// The tools of this library; either may be null.
class GivenTextTools : public TextTools {
 public:
  GivenTextTools(const Tokenizer* tokenizer, const ChatTemplate* chat);

  [[nodiscard]] bool has_tokenizer() override { return tokenizer_ != nullptr; }
  [[nodiscard]] bool has_template() override { return chat_.has_value(); }
  void require_tokenizer(const std::string& file) override;
  void require_template(const std::string& file) override;
  [[nodiscard]] Encoding encode(std::string_view text, bool add_special_tokens) override;
  [[nodiscard]] Encoding encode_beginning(std::string_view text, bool add_special_tokens, std::size_t most) override;
  [[nodiscard]] std::string decode(std::span<const TokenId> ids, bool skip_special_tokens) override;
  [[nodiscard]] std::optional<TokenId> token_to_id(std::string_view token) override;
  [[nodiscard]] std::optional<TokenId> eos_id() override;
  [[nodiscard]] const std::vector<TokenId>& eos_ids() override;
  [[nodiscard]] int64_t id_limit() override;
  [[nodiscard]] RenderedChat render(std::span<const Message> messages, const ChatOptions& options) override;
  [[nodiscard]] bool reads_key(std::string_view key) override;
  [[nodiscard]] std::optional<std::string> end_of_turn() override;

 private:
  const Tokenizer* tokenizer_;
  std::optional<ChatTemplate> chat_;  ///< With the tokenizer's special tokens.
};

}  // namespace qlorapp
