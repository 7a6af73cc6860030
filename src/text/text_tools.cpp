// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/text/text_tools.hpp"

#include "core/check.hpp"

namespace qlorapp {

GivenTextTools::GivenTextTools(const Tokenizer* tokenizer, const ChatTemplate* chat) : tokenizer_(tokenizer) {
  if (chat != nullptr) chat_ = tokenizer != nullptr ? chat->with_special_tokens(tokenizer->special_tokens()) : *chat;
}

void GivenTextTools::require_tokenizer(const std::string& file) {
  QLORAPP_CHECK_VALUE(
      tokenizer_ != nullptr,
      "[{}] rows of text need a tokenizer; the model folder has none. Copy tokenizer.json there, or write rows with 'input_ids'.",
      file);
}

void GivenTextTools::require_template(const std::string& file) {
  QLORAPP_CHECK_VALUE(chat_.has_value(),
                      "[{}] rows of messages need a chat template; the model has none. Choose one by name (--chat_template): {}; "
                      "or write rows with 'prompt' and 'completion'.",
                      file, joined(ChatTemplate::names()));
}

Encoding GivenTextTools::encode(std::string_view text, bool add_special_tokens) {
  return tokenizer_->encode_with_ranges(text, add_special_tokens);
}

Encoding TextTools::encode_beginning(std::string_view text, bool add_special_tokens, std::size_t most) {
  Encoding all = encode(text, add_special_tokens);
  if (all.ids.size() > most) all.ids.resize(most);
  if (all.ranges.size() > most) all.ranges.resize(most);
  return all;
}

Encoding GivenTextTools::encode_beginning(std::string_view text, bool add_special_tokens, std::size_t most) {
  return tokenizer_->encode_with_ranges(text, add_special_tokens, most);
}

std::string GivenTextTools::decode(std::span<const TokenId> ids, bool skip_special_tokens) {
  return tokenizer_->decode(ids, skip_special_tokens);
}

std::optional<TokenId> GivenTextTools::token_to_id(std::string_view token) { return tokenizer_->token_to_id(token); }

std::optional<TokenId> GivenTextTools::eos_id() { return tokenizer_->eos_id(); }

const std::vector<TokenId>& GivenTextTools::eos_ids() { return tokenizer_->eos_ids(); }

int64_t GivenTextTools::id_limit() { return tokenizer_->id_limit(); }

RenderedChat GivenTextTools::render(std::span<const Message> messages, const ChatOptions& options) {
  return chat_->render(messages, options);
}

bool GivenTextTools::reads_key(std::string_view key) { return chat_->reads_key(key); }

std::optional<std::string> GivenTextTools::end_of_turn() { return chat_->end_of_turn(); }

}  // namespace qlorapp
