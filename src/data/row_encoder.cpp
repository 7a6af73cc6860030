// SPDX-License-Identifier: Apache-2.0
#include "row_encoder.hpp"

#include <algorithm>
#include <optional>

#include "core/check.hpp"
#include "format/json_tree.hpp"
#include "json_reading.hpp"

namespace qlorapp {
namespace {

std::vector<TokenId> require_ids(const Row& values, const char* key, bool may_ignore, const std::string& where) {
  const std::optional<PackedIds> packed = packed_ids(values);
  QLORAPP_CHECK_FORMAT(packed || values.is_array(), "[{}] '{}' must be a list of whole numbers; got {}. Correct or remove the row.",
                       where, key, kind_of(values));
  std::vector<TokenId> out;
  out.reserve(packed ? packed->size() : values.size());
  const auto refuse = [&](const std::string& got) {
    throw FormatError(message("[{}] '{}' must be a list of token ids{}; got {}. Correct or remove the row.", where, key,
                              may_ignore ? " and -100" : "", got));
  };
  for (std::size_t i = 0; packed && i < packed->size(); ++i) {
    const int32_t id = (*packed)[i];
    if (id < 0 && !(may_ignore && id == Example::kIgnored)) refuse(message("{}", id));
    out.push_back(id);
  }
  if (packed) return out;
  for (const Row& value : values) {
    const bool is_id = value.is_number_unsigned() && value.get<uint64_t>() < (uint64_t{1} << 31);
    const bool is_ignored = may_ignore && value.is_number_integer() && value == Example::kIgnored;
    if (!is_id && !is_ignored) refuse(value.is_number() ? value.dump() : std::string(kind_of(value)));
    out.push_back(value.get<TokenId>());
  }
  return out;
}

/// All ones, as many as tokens.
bool is_whole_mask(const Row& mask, std::size_t tokens) {
  if (const auto packed = packed_ids(mask)) {
    bool ones = packed->size() == tokens;
    for (std::size_t i = 0; ones && i < tokens; ++i) ones = (*packed)[i] == 1;
    return ones;
  }
  return mask.is_array() && mask.size() == tokens && std::all_of(mask.begin(), mask.end(), [](const Row& m) { return m == 1; });
}

/// Bytes that both texts begin with.
std::size_t shared_beginning(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

bool is_there(const Row& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && !found->is_null() && !found->empty();
}

/// Keys that are null are no keys. A message with tool calls needs no content.
Message parsed_message(const Row& entry, const std::string& where) {
  Message out{require_text(entry, "role", where), {}};
  Row rest = Row::object();
  for (const auto& [key, value] : entry.items()) {
    if (key != "role" && key != "content" && !value.is_null()) rest[key] = value;
  }
  const bool says_nothing = !entry.contains("content") || entry["content"].is_null();
  QLORAPP_CHECK_FORMAT(!says_nothing || is_there(rest, "tool_calls"),
                       "[{}] a message must have a 'content' or 'tool_calls'; got keys {}. Correct or remove the row.", where,
                       joined(keys_of(entry)));
  if (!says_nothing) out.content = require_text(entry, "content", where);
  if (!rest.empty()) out.rest = rest.dump();
  return out;
}

}  // namespace

RowEncoder::RowEncoder(RowFormat format, const DatasetOptions& options, TextTools& tools, const std::string& file)
    : format_(format), options_(options), tools_(tools) {
  const bool prompt_messages = format == RowFormat::kPromptMessages, messages = format == RowFormat::kMessages || prompt_messages;
  const bool completion = format == RowFormat::kPromptCompletion || prompt_messages;
  QLORAPP_CHECK_VALUE(options.max_length >= 0, "[max_length] must be at least 0; got {}. Use 0 for no limit.", options.max_length);
  QLORAPP_CHECK_VALUE(!options.assistant_only_loss || messages,
                      "[assistant_only_loss] needs rows with 'messages'; {} has {}. Leave it unset.", file, to_string(format));
  QLORAPP_CHECK_VALUE(!options.completion_only_loss.value_or(false) || messages || completion,
                      "[completion_only_loss] needs rows with 'prompt' and 'completion' or 'messages'; {} has {}. Leave it unset.",
                      file, to_string(format));
  if (format != RowFormat::kInputIds) tools.require_tokenizer(file);
  if (messages) tools.require_template(file);
  completion_only_ = options.completion_only_loss.value_or(completion);
  assistant_only_ = options.assistant_only_loss || (format == RowFormat::kMessages && completion_only_);
}

Example RowEncoder::encode(const Row& row, const std::string& where) {
  Example out;
  switch (format_) {
    case RowFormat::kInputIds:
      out = encode_ids(row, where);
      break;
    case RowFormat::kMessages:
    case RowFormat::kPromptMessages:
      out = encode_messages(row, where);
      break;
    case RowFormat::kPromptCompletion:
      out = encode_completion(row, where);
      break;
    case RowFormat::kText:
      out = encode_text(row, where);
      break;
  }
  const int64_t limit = options_.model_vocab_size > 0 ? options_.model_vocab_size : tools_.has_tokenizer() ? tools_.id_limit() : 0;
  for (const auto* ids : {&out.input_ids, &out.labels}) {
    for (const TokenId id : *ids) {
      QLORAPP_CHECK_FORMAT(
          limit == 0 || id < limit,
          "[{}] token ids must be below the size of the vocabulary, {}; got {}. Use the tokenizer that belongs to the model.",
          where, limit, id);
    }
  }
  return out;
}

Example RowEncoder::encode_ids(const Row& row, const std::string& where) const {
  Example out;
  out.input_ids = require_ids(require(row, "input_ids", where), "input_ids", false, where);
  if (const auto mask = row.find("attention_mask"); mask != row.end() && !mask->is_null()) {
    QLORAPP_CHECK_FORMAT(is_whole_mask(*mask, out.input_ids.size()),
                         "[{}] 'attention_mask' must be 1 for each token; got another value. Write rows without padding.", where);
  }
  const auto labels = row.find("labels");
  if (labels == row.end() || labels->is_null()) {
    out.labels = out.input_ids;
    return out;
  }
  out.labels = require_ids(*labels, "labels", true, where);
  QLORAPP_CHECK_FORMAT(out.labels.size() == out.input_ids.size(),
                       "[{}] 'labels' must be as long as 'input_ids'; got {} and {}. Use -100 for tokens that are not trained.",
                       where, out.labels.size(), out.input_ids.size());
  return out;
}

Encoding RowEncoder::tokens_of(std::string_view text, bool add_special_tokens, const std::string& where) {
  try {
    return tools_.encode(text, add_special_tokens);
  } catch (const ValueError& error) {
    throw FormatError(message("[{}] the tokenizer must accept the row: {}", where, error.what()));
  }
}

void RowEncoder::append_eos(Example& out) {
  const auto eos = tools_.eos_id();
  if (!options_.append_eos || !eos || (!out.input_ids.empty() && out.input_ids.back() == *eos)) return;
  out.input_ids.push_back(*eos);
  out.labels.push_back(*eos);
}

Example RowEncoder::encode_text(const Row& row, const std::string& where) {
  Example out;
  out.input_ids = tokens_of(require_text(row, options_.text_field, where), true, where).ids;
  out.labels = out.input_ids;
  append_eos(out);
  return out;
}

Example RowEncoder::encode_completion(const Row& row, const std::string& where) {
  const std::string& prompt = require_text(row, "prompt", where);
  const std::string text = prompt + require_text(row, "completion", where);
  const Encoding encoding = tokens_of(text, true, where);
  Example out;
  if (completion_only_) label(encoding, {{prompt.size(), text.size()}}, out, where);
  else out = {encoding.ids, encoding.ids};
  // What the post-processor puts behind the text has an empty range there; it belongs to the completion.
  for (std::size_t i = encoding.ranges.size(); i > 0 && encoding.ranges[i - 1] == TextRange{text.size(), text.size()}; --i) {
    out.labels[i - 1] = out.input_ids[i - 1];
  }
  append_eos(out);
  return out;
}

Example RowEncoder::encode_messages(const Row& row, const std::string& where) {
  const bool has_prompt = format_ == RowFormat::kPromptMessages;
  Row list = Row::array();
  const format::DismantledAtEnd list_end(list);
  list = require(row, has_prompt ? "prompt" : "messages", where);
  const std::size_t prompt_size = list.size();
  if (has_prompt) list.insert(list.end(), row["completion"].begin(), row["completion"].end());
  QLORAPP_CHECK_FORMAT(
      !is_there(row, "functions"),
      "[{}] tools must be in 'tools'; got 'functions'. Write \"tools\": [{{\"type\": \"function\", \"function\": …}}].", where);
  const ChatOptions options{.date_string = options_.date_string,
                            .tools = row.contains("tools") ? row["tools"].dump() : std::string(),
                            .turns = assistant_only_};
  std::vector<Message> messages;
  for (const Row& entry : list) messages.push_back(parsed_message(entry, where));
  RenderedChat chat;
  std::size_t prompt_end = 0;
  try {
    chat = tools_.render(messages, options);
    if (has_prompt && completion_only_) {  // TRL's rule: the prompt ends where generation would begin
      ChatOptions begun = options;
      begun.add_generation_prompt = true;
      begun.turns = false;
      prompt_end = shared_beginning(chat.text, tools_.render(std::span(messages).first(prompt_size), begun).text);
    }
  } catch (const Error& error) {
    throw FormatError(message("[{}] the conversation must fit the template: {}", where, error.what()));
  }
  const Encoding encoding = tokens_of(chat.text, false, where);
  if (!assistant_only_ && prompt_end == 0) return {encoding.ids, encoding.ids};
  std::vector<TextRange> trained;
  if (!assistant_only_) trained.push_back({prompt_end, chat.text.size()});
  for (const Turn& turn : chat.turns) {
    const bool speaks = turn.role == "assistant" && turn.begin >= prompt_end;
    if (assistant_only_ && speaks) trained.push_back({turn.begin, turn.end});
  }
  Example out;
  label(encoding, trained, out, where);
  return out;
}

void RowEncoder::label(const Encoding& encoding, const std::vector<TextRange>& trained, Example& out, const std::string& where) {
  QLORAPP_CHECK_FORMAT(encoding.ranges.size() == encoding.ids.size(),
                       "[{}] this tokenizer does not map tokens to characters, so only whole rows can be trained. Train whole rows "
                       "(--completion_only_loss false), or write rows with 'input_ids' and 'labels'.",
                       where);
  out.input_ids = encoding.ids;
  out.labels.assign(encoding.ids.size(), Example::kIgnored);
  std::size_t next = 0;
  for (std::size_t i = 0; i < encoding.ids.size(); ++i) {
    const TextRange token = encoding.ranges[i];
    while (next < trained.size() && trained[next].end <= token.begin) ++next;
    if (next == trained.size()) break;
    if (token.end <= trained[next].begin) continue;  // also the empty ranges of tokens that the post-processor puts in front
    out.labels[i] = encoding.ids[i];
    if (token.begin < trained[next].begin || token.end > trained[next].end) ++straddling_;
  }
}

}  // namespace qlorapp
