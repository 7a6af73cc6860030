// SPDX-License-Identifier: Apache-2.0
#include "row_encoder.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "answers.hpp"

#include "core/check.hpp"
#include "json/json_tree.hpp"
#include "text/json_reading.hpp"
#include "text/unicode.hpp"

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

constexpr std::size_t kMostUnusedKeys = 16;
constexpr const char* kReasoning = "reasoning_content";

bool is_empty_answer(const Message& message) {
  return message.role == "assistant" && message.rest.empty() && unicode::strip(message.content).empty();
}

std::string way_out(const ChatPart& part, bool reads_reasoning) {
  constexpr std::string_view kOther = "Remove it, or choose another template (--chat_template).";
  if (!holds_thoughts(part.what)) return std::string(kOther);
  if (reads_reasoning && part.what != kReasoning) return message("Name the key '{}'.", kReasoning);
  return message("Put it into 'content' between <think> and </think>. {}", kOther);
}

/// The first characters of a text as a JSON string.
std::string excerpt(std::string_view text) {
  constexpr std::size_t kMost = 40;
  std::size_t end = std::min(text.size(), kMost);
  while (end < text.size() && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) --end;
  return Row(std::string(text.substr(0, end)) + (end < text.size() ? "…" : "")).dump();
}

/// " of message 3", with its role if that is not one of those that every template writes.
std::string place_of(std::size_t index, std::span<const Message> messages) {
  const std::string& role = messages[index].role;
  const bool common = role == "system" || role == "user" || role == "assistant";
  return message(" of message {}{}", index, common ? std::string() : message(" with role '{}'", role));
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
  most_ = options.max_length > 0 ? static_cast<std::size_t>(options.max_length) + 1 : kMostRowIds + 1;  // more are cut off
  completion_only_ = options.completion_only_loss.value_or(completion);
  const bool prefers = options.prefer_assistant_only && options.completion_only_loss.value_or(true);
  assistant_only_ = options.assistant_only_loss || (format == RowFormat::kMessages && (completion_only_ || prefers));
}

std::vector<Example> RowEncoder::encode(const Row& row, const std::string& where) {
  std::vector<Example> out;
  switch (format_) {
    case RowFormat::kInputIds:
      out.push_back(encode_ids(row, where));
      break;
    case RowFormat::kMessages:
    case RowFormat::kPromptMessages:
      out = encode_messages(row, where);
      break;
    case RowFormat::kPromptCompletion:
      out.push_back(encode_completion(row, where));
      break;
    case RowFormat::kText:
      out.push_back(encode_text(row, where));
      break;
  }
  const int64_t limit = options_.model_vocab_size > 0 ? options_.model_vocab_size : tools_.has_tokenizer() ? tools_.id_limit() : 0;
  const auto check = [&](TokenId id) {
    QLORAPP_CHECK_FORMAT(
        limit == 0 || id < limit,
        "[{}] token ids must be below the size of the vocabulary, {}; got {}. Use the tokenizer that belongs to the model.", where,
        limit, id);
  };
  for (const Example& example : out) {
    std::for_each(example.input_ids.begin(), example.input_ids.end(), check);
    std::for_each(example.labels.begin(), example.labels.end(), check);
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
    Encoding encoding = tools_.encode_beginning(text, add_special_tokens, most_);
    QLORAPP_CHECK_FORMAT(options_.max_length != 0 || encoding.ids.size() <= kMostRowIds,
                         "[{}] a row may have at most {} tokens; this one has more. Split it into several rows.", where,
                         kMostRowIds);
    return encoding;
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
  const std::string& text = require_text(row, options_.text_field, where);
  counts_.empty_answers += unicode::strip(text).empty() ? 1 : 0;
  out.input_ids = tokens_of(text, true, where).ids;
  out.labels = out.input_ids;
  append_eos(out);
  return out;
}

Example RowEncoder::encode_completion(const Row& row, const std::string& where) {
  const std::string& prompt = require_text(row, "prompt", where);
  const std::string& completion = require_text(row, "completion", where);
  counts_.empty_answers += unicode::strip(completion).empty() ? 1 : 0;
  const std::string text = prompt + completion;
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

std::vector<RowMessage> RowEncoder::messages_of(const Row& list, const std::string& where) {
  std::vector<RowMessage> out;
  bool flagged = false;
  for (const Row& entry : list) {
    const RowMessage& read = out.emplace_back(read_message(entry, where));
    flagged = flagged || read.trained.has_value();
    if (!read.flag.empty()) counts_.flags.insert(read.flag);
    if (read.trained.value_or(false) && read.message.role != "assistant") ++counts_.misplaced_flags;
    if (read.message.rest.empty() || counts_.unused_message_keys.size() >= kMostUnusedKeys) continue;
    const Row rest = parse_row(read.message.rest, where);
    for (const auto& [key, value] : rest.items()) {
      if (key != "tool_calls" && !value.empty() && !tools_.reads_key(key)) counts_.unused_message_keys.insert(key);
    }
  }
  counts_.flagged += flagged ? 1 : 0;
  return out;
}

std::vector<Example> RowEncoder::encode_messages(const Row& row, const std::string& where) {
  const bool has_prompt = format_ == RowFormat::kPromptMessages;
  Row list = Row::array();
  const format::DismantledAtEnd list_end(list);
  list = require(row, has_prompt ? "prompt" : "messages", where);
  const std::size_t prompt_size = list.size();
  if (has_prompt) list.insert(list.end(), row["completion"].begin(), row["completion"].end());
  QLORAPP_CHECK_FORMAT(
      !is_there(row, "functions"),
      "[{}] tools must be in 'tools'; got 'functions'. Write \"tools\": [{{\"type\": \"function\", \"function\": …}}].", where);
  QLORAPP_CHECK_FORMAT(!list.empty(), "[{}] a conversation must have a message; got none. Add one, or remove the row.", where);
  std::vector<RowMessage> read = messages_of(list, where);
  list = Row::array();  // a conversation may be large
  const std::size_t begin = has_prompt && completion_only_ ? prompt_size : 0;
  bool by_turn = assistant_only_, empty = false;
  std::vector<Message> messages;
  std::vector<bool> wanted;
  for (RowMessage& one : read) {
    by_turn = by_turn || one.trained.has_value();
    const bool speaks = messages.size() >= begin && one.message.role == "assistant" && one.trained.value_or(true);
    empty = empty || (speaks && is_empty_answer(one.message));
    wanted.push_back(speaks);
    messages.push_back(std::move(one.message));
  }
  counts_.empty_answers += empty ? 1 : 0;

  ChatOptions options{.date_string = options_.date_string,
                      .tools = row.contains("tools") ? row["tools"].dump() : std::string(),
                      .turns = false,
                      .served = begin > 0 && messages.back().role == "assistant"};
  std::vector<TrainedText> texts;
  try {
    if (by_turn) {
      texts = trained_texts(tools_, messages, wanted, options);
    } else {
      std::string text = tools_.render(messages, options).text;
      std::size_t prompt_end = 0;
      if (begin > 0) {  // TRL's rule: the prompt ends where generation would begin
        ChatOptions begun = options;
        begun.add_generation_prompt = true;
        prompt_end = shared_beginning(text, tools_.render(std::span(messages).first(prompt_size), begun).text);
      }
      const TextRange all{prompt_end, text.size()};
      texts.push_back({std::move(text), {all}, messages.size()});
    }
  } catch (const Error& error) {
    throw FormatError(message("[{}] the conversation must fit the template: {}", where, error.what()));
  }
  std::vector<std::size_t> sizes;
  for (const TrainedText& text : texts) sizes.push_back(text.messages);
  check_written(messages, options, sizes, by_turn ? messages.size() : begin, where);

  std::vector<Example> out;
  for (const TrainedText& text : texts) {
    const Encoding encoding = by_turn ? served_tokens(text, where) : tokens_of(text.text, false, where);
    Example& example = out.emplace_back();
    if (!by_turn && text.trained.front().begin == 0) example = {encoding.ids, encoding.ids};
    else label(encoding, text.trained, example, where);
  }
  return out;
}

Encoding RowEncoder::served_tokens(const TrainedText& text, const std::string& where) {
  Encoding whole = tokens_of(text.text, false, where);
  if (text.trained.empty() || whole.ranges.size() != whole.ids.size()) return whole;
  const std::size_t begin = text.trained.back().begin;
  const auto across = std::find_if(whole.ranges.begin(), whole.ranges.end(),
                                   [&](const TextRange& token) { return token.begin < begin && begin < token.end; });
  if (across == whole.ranges.end() ||
      !unicode::strip(std::string_view(text.text).substr(across->begin, across->end - across->begin)).empty())
    return whole;
  const std::string_view both = text.text;
  Encoding out = tokens_of(both.substr(0, begin), false, where);
  const Encoding answer = tokens_of(both.substr(begin), false, where);
  for (std::size_t i = 0; i < answer.ids.size(); ++i) {
    // A tokenizer that puts a space in front of every text cannot encode the answer alone.
    if (i > 0 && answer.ranges[i].begin < answer.ranges[i - 1].end &&
        unicode::strip(both.substr(begin, answer.ranges[i].end)).empty())
      return whole;
    out.ids.push_back(answer.ids[i]);
    out.ranges.push_back({answer.ranges[i].begin + begin, answer.ranges[i].end + begin});
  }
  if (out.ids.size() > most_) {
    out.ids.resize(most_);
    out.ranges.resize(most_);
  }
  return out;
}

void RowEncoder::check_written(std::span<const Message> messages, const ChatOptions& options, const std::vector<std::size_t>& texts,
                               std::size_t trained, const std::string& where) {
  MarkedChat marked(messages, options.tools);
  ChatOptions with_marks = options;
  with_marks.tools = marked.tools();
  with_marks.turns = false;
  const auto render = [&](std::size_t count, bool begins) -> std::optional<std::string> {
    ChatOptions asked = with_marks;
    asked.add_generation_prompt = begins;
    asked.served = !begins && (with_marks.served || trained == messages.size()) && messages[count - 1].role == "assistant";
    try {
      return tools_.render(marked.messages().first(count), asked).text;
    } catch (const ValueError&) {
      return std::nullopt;
    }  // the template looks at what has a mark now, or does not write so few messages
  };
  std::size_t held = 0;
  for (const std::size_t count : texts) {
    const std::optional<std::string> text = render(count, false);
    if (!text) return;
    marked.look(*text);
    held = std::max(held, count);
  }
  bool rewritten = false;
  for (std::size_t i = 0; i < marked.parts().size(); ++i) {
    const ChatPart& part = marked.parts()[i];
    if (part.written || (part.message >= held && part.message < messages.size())) continue;
    std::size_t last = held;  // the last answer behind the part
    while (last > 0 && messages[last - 1].role != "assistant") --last;
    const bool in_message = part.message < messages.size();
    const bool as_last = in_message && marked.holds(render(part.message + 1, false).value_or(""), i);
    if (as_last || (last > 1 && marked.holds(render(last - 1, true).value_or(""), i))) {
      rewritten = rewritten || (in_message && part.message >= trained);
      continue;
    }
    throw FormatError(message("[{}] the chat template must write all text of a conversation; it leaves out {} {}{}. {}", where,
                              part.what, excerpt(part.text), in_message ? place_of(part.message, messages) : std::string(),
                              way_out(part, tools_.reads_key(kReasoning))));
  }
  counts_.rewritten += rewritten ? 1 : 0;
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
    if (token.begin < trained[next].begin || token.end > trained[next].end) ++counts_.straddling;
  }
}

}  // namespace qlorapp
