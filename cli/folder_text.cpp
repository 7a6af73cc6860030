// SPDX-License-Identifier: Apache-2.0
#include "folder_text.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "qlorapp/core/log.hpp"
#include "text/unsupported.hpp"

namespace qlorapp::cli {

TextFiles FolderText::files() const {
  return TextFiles(folder_, chat_template_.empty() ? std::nullopt : std::optional(ChatTemplate::source(chat_template_)));
}

bool FolderText::names_template() const { return !chat_template_.empty() || ChatTemplate::is_in(folder_); }

const Tokenizer* FolderText::native() {
  if (!tokenizer_opened_) {
    tokenizer_opened_ = true;
    if (!files::has_entry(folder_, "tokenizer.json")) {
      tokenizer_error_ = message(
          "[tokenizer] {} has no tokenizer.json. Copy it from the model's page, or give rows of input_ids and labels.", folder_);
    } else {
      try {
        tokenizer_ = Tokenizer::from_folder(folder_, model_);
      } catch (const UnsupportedError& error) { tokenizer_error_ = error.what(); } catch (const Error&) {
        tokenizer_damage_ = std::current_exception();
      }
    }
  }
  return tokenizer_ ? &*tokenizer_ : nullptr;
}

HfText& FolderText::through_transformers(const std::string& error) {
  if (!hf_) {
    try {
      hf_ = HfText::start(folder_, model_);
    } catch (const Error& reason) { throw FormatError(message("{} ({})", error, reason.what())); }
    if (!hf_) {
      throw FormatError(message("{}{}", error,
                                error.find("qlorapp[hf]") == std::string::npos
                                    ? " Or install transformers (pip install \"qlorapp[hf]\") and run the wheel's qlorapp command, "
                                      "which reads it through transformers."
                                    : ""));
    }
    log_info(message("read through transformers: {}", error.substr(0, error.find(". "))));
  }
  return *hf_;
}

bool FolderText::has_tokenizer() { return native() != nullptr || (hf_ && !tokenizer_error_.empty()); }

void FolderText::require_tokenizer(const std::string&) {
  if (native() != nullptr) return;
  if (tokenizer_damage_) std::rethrow_exception(tokenizer_damage_);
  (void)through_transformers(tokenizer_error_);
}

bool FolderText::has_template() {
  if (!template_opened_) {
    chat_ = chat_template_.empty() ? ChatTemplate::from_folder(folder_) : ChatTemplate::choose(chat_template_, folder_);
    if (chat_) {
      if (native() != nullptr) chat_ = chat_->with_special_tokens(tokenizer_->special_tokens());
      else if (!tokenizer_damage_) chat_ = chat_->with_special_tokens(through_transformers(tokenizer_error_).special_tokens());
    }
    template_opened_ = true;
  }
  return chat_.has_value();
}

void FolderText::require_template(const std::string& file) {
  if (!has_template()) GivenTextTools(nullptr, nullptr).require_template(file);
}

Encoding FolderText::encode(std::string_view text, bool add_special_tokens) {
  return native() != nullptr ? tokenizer_->encode_with_ranges(text, add_special_tokens) : hf_->encode(text, add_special_tokens);
}

Encoding FolderText::encode_beginning(std::string_view text, bool add_special_tokens, std::size_t most) {
  return native() != nullptr ? tokenizer_->encode_with_ranges(text, add_special_tokens, most)
                             : TextTools::encode_beginning(text, add_special_tokens, most);
}

std::string FolderText::decode(std::span<const TokenId> ids, bool skip_special_tokens) {
  return native() != nullptr ? tokenizer_->decode(ids, skip_special_tokens) : hf_->decode(ids, skip_special_tokens);
}

std::optional<TokenId> FolderText::token_to_id(std::string_view token) {
  return native() != nullptr ? tokenizer_->token_to_id(token) : hf_->token_to_id(token);
}

std::optional<TokenId> FolderText::eos_id() { return native() != nullptr ? tokenizer_->eos_id() : hf_->eos_id(); }

const std::vector<TokenId>& FolderText::eos_ids() { return native() != nullptr ? tokenizer_->eos_ids() : hf_->eos_ids(); }

int64_t FolderText::id_limit() { return native() != nullptr ? tokenizer_->id_limit() : hf_->id_limit(); }

RenderedChat FolderText::render(std::span<const Message> messages, const ChatOptions& options) {
  return chat_->render(messages, options);
}

bool FolderText::reads_key(std::string_view key) { return chat_->reads_key(key); }

std::optional<std::string> FolderText::end_of_turn() { return chat_->end_of_turn(); }

}  // namespace qlorapp::cli
