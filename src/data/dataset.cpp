// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/dataset.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.hpp"
#include "json/json_tree.hpp"
#include "qlorapp/text/text_tools.hpp"
#include "row_encoder.hpp"
#include "row_reader.hpp"
#include "row_shape.hpp"
#include "text/json_reading.hpp"
#include "text/unicode.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 24;  // tiny ones, too, take memory for vectors

std::vector<std::string> unused_keys(const Row& row, const RowShape& shape) {
  std::vector<std::string> out = keys_of(row);
  const auto& used = shape.columns();
  std::erase_if(out, [&](const std::string& key) { return std::find(used.begin(), used.end(), key) != used.end(); });
  return out;
}

/// What the rows are, for people: text files have lines or paragraphs, the others columns.
std::string described(const std::string& shape, FileFormat format) {
  switch (format) {
    case FileFormat::kLines:
      return "text, one row per line";
    case FileFormat::kParagraphs:
      return "text, paragraphs between blank lines";
    case FileFormat::kCsv:
      return message("{}, from CSV", shape);
    case FileFormat::kTsv:
      return message("{}, from TSV", shape);
    default:
      return shape;
  }
}

int64_t count_targets(const Example& example) {
  if (example.labels.empty()) return 0;
  return std::count_if(example.labels.begin() + 1, example.labels.end(), [](TokenId label) { return label != Example::kIgnored; });
}

/// Counts an example, and finds out whether it ends in EOS.
void count(Example& example, TextTools& tools, DatasetSummary& summary) {
  const auto length = static_cast<int64_t>(example.input_ids.size());
  summary.tokens += length;
  summary.target_tokens += count_targets(example);
  if (length > summary.longest) {
    summary.longest = length;
    summary.longest_line = example.line;
  }
  if (!summary.eos_known) return;
  const auto is_blank = [&](TokenId id) { return unicode::strip(tools.decode(std::vector{id}, false)).empty(); };
  example.ends_in_eos = ends_in_trained_eos(example, tools.eos_ids(), is_blank);
  if (*example.ends_in_eos) ++summary.ends_in_eos;
}

}  // namespace

bool ends_in_trained_eos(const Example& example, std::span<const TokenId> ends, const std::function<bool(TokenId)>& is_blank) {
  for (std::size_t i = example.input_ids.size(); i-- > 0;) {
    const TokenId id = example.input_ids[i];
    if (std::find(ends.begin(), ends.end(), id) != ends.end()) return i > 0 && example.labels[i] != Example::kIgnored;
    if (!is_blank || !is_blank(id)) return false;
  }
  return false;
}

std::string_view to_string(RowFormat format) {
  switch (format) {
    case RowFormat::kInputIds:
      return "input_ids";
    case RowFormat::kMessages:
      return "messages";
    case RowFormat::kPromptCompletion:
      return "prompt/completion";
    case RowFormat::kPromptMessages:
      return "prompt/completion messages";
    case RowFormat::kText:
      return "text";
  }
  return {};
}

FileFormat parse_file_format(std::string_view name) {
  if (name == "auto") return FileFormat::kByName;
  if (name == "json") return FileFormat::kJson;
  if (name == "csv") return FileFormat::kCsv;
  if (name == "tsv") return FileFormat::kTsv;
  if (name == "text") return FileFormat::kLines;
  if (name == "paragraphs") return FileFormat::kParagraphs;
  throw ValueError(message("[data_format] must be auto, json, csv, tsv, text (one row per line) or paragraphs; got '{}'.", name));
}

Dataset Dataset::read(const std::string& path, const DatasetOptions& options, const Tokenizer* tokenizer,
                      const ChatTemplate* chat) {
  GivenTextTools tools(tokenizer, chat);
  return read(path, options, tools);
}

Dataset Dataset::read(const std::string& path, const DatasetOptions& options, TextTools& tools) {
  Dataset out;
  DatasetSummary& summary = out.summary;
  std::optional<RowShape> shape;
  std::optional<RowEncoder> encoder;
  const std::string& file = path;

  const RowFile read = for_each_row(path, options.file_format, options.text_field, [&](Row raw, int64_t line) {
    const std::string where = message("{}:{}", file, line);
    QLORAPP_CHECK_FORMAT(
        summary.rows < kMostRows,
        "[{}] a file may have at most {} rows; this one has more. Put several texts into one row, or split the file.", where,
        kMostRows);
    const format::DismantledAtEnd raw_end(raw);
    if (!shape) {
      shape = RowShape::detect(
          raw, options, [&] { return tools.has_template(); }, where);
      summary.format = shape->format();
      summary.ignored_keys = unused_keys(raw, *shape);
      encoder.emplace(summary.format, options, tools, file);
      summary.eos_known = tools.has_tokenizer() && !tools.eos_ids().empty();
    }
    QLORAPP_CHECK_FORMAT(raw.is_object(), "[{}] a row must be a JSON object; got {}. Write one object per row.", where,
                         kind_of(raw));
    Row row = shape->canonical(std::move(raw), where);
    const format::DismantledAtEnd row_end(row);
    ++summary.rows;
    const EncodedRows& counts = encoder->counts();
    const auto of_this_row = [&](int64_t count, int64_t& first) {
      if (count > 0 && first == 0) first = line;
    };
    const int64_t empty = counts.empty_answers;
    std::vector<Example> examples = encoder->encode(row, where);
    of_this_row(counts.straddling, summary.first_straddling_line);
    of_this_row(counts.rewritten, summary.first_rewritten_line);
    const std::size_t before = out.examples.size();
    for (Example& example : examples) {
      example.line = line;
      example.row = summary.rows - 1;
      if (const auto limit = static_cast<std::size_t>(options.max_length); limit != 0 && example.input_ids.size() > limit) {
        example.input_ids.resize(limit);
        example.labels.resize(limit);
        example.input_ids.shrink_to_fit();
        example.labels.shrink_to_fit();
        ++summary.truncated;
      }
      if (count_targets(example) == 0) continue;
      count(example, tools, summary);
      out.examples.push_back(std::move(example));
    }
    const std::size_t kept = out.examples.size() - before;
    if (kept == 0) ++summary.dropped;
    else summary.empty_answers += counts.empty_answers - empty;
    of_this_row(summary.empty_answers, summary.first_empty_line);
    if (examples.size() > 1) {
      ++summary.split_rows;
      summary.split_examples += static_cast<int64_t>(kept);
    }
  });

  QLORAPP_CHECK_FORMAT(summary.rows > 0, "[{}] the data must have a row; it is empty. Check the path of the data.", file);
  QLORAPP_CHECK_FORMAT(!out.examples.empty(),
                       "[{}] a row must have a trained token; none of {} has a label after its first token. {}horten the prompts "
                       "and check the labels.",
                       file, summary.rows, summary.truncated > 0 ? "Raise max_length, or s" : "S");
  summary.blank_lines = read.blank_lines;
  summary.detected = described(shape->description(), read.format);
  const EncodedRows& counts = encoder->counts();
  summary.examples = std::ssize(out.examples);
  summary.straddling = counts.straddling;
  summary.flagged_rows = counts.flagged;
  summary.misplaced_flags = counts.misplaced_flags;
  summary.flags.assign(counts.flags.begin(), counts.flags.end());
  summary.rewritten_rows = counts.rewritten;
  summary.ignored_message_keys.assign(counts.unused_message_keys.begin(), counts.unused_message_keys.end());
  summary.others_train_all =
      summary.format == RowFormat::kMessages && !options.assistant_only_loss && !options.completion_only_loss.value_or(false);
  if (summary.format == RowFormat::kMessages || summary.format == RowFormat::kPromptMessages) {
    const auto end = tools.end_of_turn();
    summary.end_of_turn_is_one_token = !end || tools.token_to_id(*end).has_value();
  }
  return out;
}

std::string DatasetSummary::line() const {
  std::string out = message("{} rows of {}: {} tokens, {} trained; longest {} (line {})", rows - dropped, detected, tokens,
                            target_tokens, longest, longest_line);
  if (split_rows > 0) {
    out += message(
        "; {} rows became {} samples, each answer with what is served before it, because the template rewrites earlier turns",
        split_rows, split_examples);
  }
  if (truncated > 0) out += message("; {} cut", truncated);
  if (dropped > 0) out += message("; {} left out, without a trained token", dropped);
  if (blank_lines > 0) out += message("; {} blank lines", blank_lines);
  if (eos_known)
    out += message("; {} % end in a trained EOS",
                   std::round(1000.0 * static_cast<double>(ends_in_eos) / static_cast<double>(examples)) / 10.0);
  if (!ignored_keys.empty()) out += message("; keys not used: {}", joined(ignored_keys));
  if (!ignored_message_keys.empty()) out += message("; keys of messages not used: {}", joined(ignored_message_keys));
  return out;
}

std::vector<std::string> DatasetSummary::warnings() const {
  std::vector<std::string> out;
  if (eos_known && ends_in_eos == 0) {
    out.emplace_back(
        "0 % of the rows end in a trained EOS: the model will not learn to stop. Append EOS, raise max_length, or check "
        "eos_token.");
  }
  if (!end_of_turn_is_one_token) {
    out.emplace_back(
        "The end-of-turn token of the chat template is not a token of this tokenizer: it is learned as several pieces. "
        "Add it to the tokenizer, or choose the template that belongs to the model.");
  }
  if (straddling > 0) {
    out.push_back(
        message("{} tokens span the end of a prompt and the start of the trained text (first in line {}). They are trained. Move "
                "white space from the end of the prompt to the completion.",
                straddling, first_straddling_line));
  }
  if (empty_answers > 0) {
    out.push_back(
        message("{} of {} rows have an empty answer or text (first in line {}): they train the model to say nothing. "
                "Fill them in, or remove them.",
                empty_answers, rows, first_empty_line));
  }
  if (rewritten_rows > 0) {
    out.push_back(message(
        "{} of {} rows lose text (first in line {}): the template leaves out thoughts of earlier answers, or a system message, "
        "where other messages follow. Train each answer as it is served: --assistant_only_loss.",
        rewritten_rows, rows, first_rewritten_line));
  }
  if (flagged_rows > 0) {
    out.push_back(
        message("In {} rows flags of messages {} decide what is trained: the assistant's messages that they do not leave "
                "out. Remove the keys to train without them.",
                flagged_rows, joined(flags)));
  }
  if (misplaced_flags > 0) {
    out.push_back(
        message("{} messages of other roles than the assistant have a flag that calls them trained; only the assistant's are "
                "trained.",
                misplaced_flags));
  }
  if (others_train_all && flagged_rows > 0 && flagged_rows < rows) {
    out.push_back(
        message("{} of {} rows have flags, and train the assistant's messages that are not masked; the others train all "
                "tokens. Train the assistant's messages of all rows: --assistant_only_loss.",
                flagged_rows, rows));
  }
  if (truncated * 10 > std::max(rows, examples)) {
    out.push_back(message("{} of {} rows were cut at max_length and lost their end.", truncated, std::max(rows, examples)));
  }
  return out;
}

std::string render_sample(const Example& example, const Tokenizer& tokenizer) {
  GivenTextTools tools(&tokenizer, nullptr);
  return render_sample(example, tools);
}

std::string render_sample(const Example& example, TextTools& tools) {
  std::string out, before;  // the text of all tokens so far: a decoder may treat the start of a text in a way of its own
  const auto trained = [&](std::size_t i) { return i > 0 && example.labels[i] != Example::kIgnored; };
  for (std::size_t begin = 0; begin < example.input_ids.size();) {
    std::size_t end = begin;
    while (end < example.input_ids.size() && trained(end) == trained(begin)) ++end;
    std::string whole = tools.decode(std::span(example.input_ids).first(end), false);
    auto same = std::mismatch(before.begin(), before.end(), whole.begin(), whole.end()).second;
    while (same != whole.begin() && same != whole.end() && (static_cast<uint8_t>(*same) & 0xC0) == 0x80) --same;
    const std::string text(same, whole.end());
    before = std::move(whole);
    out += trained(begin) ? message("«{}»", text) : text;
    begin = end;
  }
  return out;
}

}  // namespace qlorapp
