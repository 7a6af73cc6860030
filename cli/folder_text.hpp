// SPDX-License-Identifier: Apache-2.0
/// Tokenizer and chat template of a model folder, opened when something needs them: by this library, or where it does not know them
/// (UnsupportedError) by transformers (hf_text.hpp). What is refused for another reason is refused: damage, a link, a limit.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "hf_text.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/text/text_tools.hpp"

namespace qlorapp::cli {

class FolderText : public TextTools {
 public:
  /// @param folder  of a model, or of an adapter with its tokenizer.  @param model  the model's folder.
  /// @param chat_template  a name of ChatTemplate::names(), a .jinja file, or empty for the folder's own.
  FolderText(std::string folder, std::string model, std::string chat_template)
      : folder_(std::move(folder)), model_(std::move(model)), chat_template_(std::move(chat_template)) {}

  /// The files of both, for what is trained with them. @throws FormatError, IoError as TextFiles.
  [[nodiscard]] TextFiles files() const;
  /// Whether a template is chosen, or the folder has one, known or not. Nothing is opened for it but tokenizer_config.json.
  [[nodiscard]] bool names_template() const;

  [[nodiscard]] bool has_tokenizer() override;
  [[nodiscard]] bool has_template() override;
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
  /// The tokenizer of this library, if the folder has one that it knows.
  const Tokenizer* native();
  /// transformers' reader, where this library's refused with `error`. @throws `error` with the way out if there is none.
  HfText& through_transformers(const std::string& error);

  std::string folder_, model_, chat_template_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::unique_ptr<HfText> hf_;
  std::string tokenizer_error_;          ///< Why this library does not know the tokenizer: transformers may.
  std::exception_ptr tokenizer_damage_;  ///< Why no one is to read it.
  bool tokenizer_opened_ = false, template_opened_ = false;
};

}  // namespace qlorapp::cli
