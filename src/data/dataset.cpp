// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/dataset.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "json_reading.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/data/text_tools.hpp"
#include "row_encoder.hpp"
#include "row_reader.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

std::vector<std::string> unused_keys(const Row& row, RowFormat format, const DatasetOptions& options) {
  std::vector<std::string> used;
  switch (format) {
    case RowFormat::kInputIds:
      used = {"input_ids", "labels", "attention_mask"};
      break;
    case RowFormat::kMessages:
      used = {"messages", "tools"};
      break;
    case RowFormat::kPromptCompletion:
      used = {"prompt", "completion"};
      break;
    case RowFormat::kText:
      used = {options.text_field};
      break;
  }
  std::vector<std::string> out;
  for (const auto& [key, value] : row.items()) {
    if (std::find(used.begin(), used.end(), key) == used.end()) out.push_back(key);
  }
  return out;
}

int64_t count_targets(const Example& example) {
  if (example.labels.empty()) return 0;
  return std::count_if(example.labels.begin() + 1, example.labels.end(), [](TokenId label) { return label != Example::kIgnored; });
}

/// Whether the row ends with a token that is trained and ends a generation; white space may follow it, as in ChatML.
bool ends_in_trained_eos(const Example& example, TextTools& tools) {
  const auto& ends = tools.eos_ids();
  for (std::size_t i = example.input_ids.size(); i-- > 0;) {
    const TokenId id = example.input_ids[i];
    if (std::find(ends.begin(), ends.end(), id) != ends.end()) return i > 0 && example.labels[i] != Example::kIgnored;
    if (!unicode::strip(tools.decode(std::vector{id}, false)).empty()) return false;
  }
  return false;
}

void count(const Example& example, TextTools& tools, DatasetSummary& summary) {
  const auto length = static_cast<int64_t>(example.input_ids.size());
  summary.tokens += length;
  summary.target_tokens += count_targets(example);
  if (length > summary.longest) {
    summary.longest = length;
    summary.longest_line = example.line;
  }
  if (summary.eos_known && ends_in_trained_eos(example, tools)) ++summary.ends_in_eos;
}

}  // namespace

std::string_view to_string(RowFormat format) {
  switch (format) {
    case RowFormat::kInputIds:
      return "input_ids";
    case RowFormat::kMessages:
      return "messages";
    case RowFormat::kPromptCompletion:
      return "prompt/completion";
    case RowFormat::kText:
      return "text";
  }
  return {};
}

Dataset Dataset::read(const std::string& path, const DatasetOptions& options, const Tokenizer* tokenizer,
                      const ChatTemplate* chat) {
  GivenTextTools tools(tokenizer, chat);
  return read(path, options, tools);
}

Dataset Dataset::read(const std::string& path, const DatasetOptions& options, TextTools& tools) {
  Dataset out;
  DatasetSummary& summary = out.summary;
  std::optional<RowEncoder> encoder;
  const std::string& file = path;

  summary.blank_lines = for_each_row(path, [&](std::string_view text, int64_t line) {
    const std::string where = concat(file, ":", line);
    const Row row = parse_row(text, where);
    if (!encoder) {
      summary.format = detect_format(row, options, where);
      summary.ignored_keys = unused_keys(row, summary.format, options);
      encoder.emplace(summary.format, options, tools, file);
      summary.eos_known = tools.has_tokenizer() && !tools.eos_ids().empty();
    }
    ++summary.rows;
    const int64_t straddling = encoder->straddling();
    Example example = encoder->encode(row, where);
    example.line = line;
    if (encoder->straddling() != straddling && summary.first_straddling_line == 0) summary.first_straddling_line = line;
    if (const auto limit = static_cast<std::size_t>(options.max_length); limit != 0 && example.input_ids.size() > limit) {
      example.input_ids.resize(limit);
      example.labels.resize(limit);
      ++summary.truncated;
    }
    if (count_targets(example) == 0) {
      ++summary.dropped;
      return;
    }
    count(example, tools, summary);
    out.examples.push_back(std::move(example));
  });

  QLORAPP_CHECK_FORMAT(summary.rows > 0, "[", file, "] the data must have a row; it is empty. Check the path of the data.");
  QLORAPP_CHECK_FORMAT(!out.examples.empty(), "[", file, "] a row must have something to learn; none of ", summary.rows,
                       " has a label behind its first token. ", summary.truncated > 0 ? "Raise max_length, or s" : "S",
                       "horten the prompts and check the labels.");
  summary.straddling = encoder->straddling();
  if (summary.format == RowFormat::kMessages) {
    const auto end = tools.end_of_turn();
    summary.end_of_turn_is_one_token = !end || tools.token_to_id(*end).has_value();
  }
  return out;
}

std::string DatasetSummary::line() const {
  const int64_t examples = rows - dropped;
  std::string out = concat(examples, " rows of ", to_string(format), ": ", tokens, " tokens, ", target_tokens, " trained; longest ",
                           longest, " (line ", longest_line, ")");
  if (truncated > 0) out += concat("; ", truncated, " cut");
  if (dropped > 0) out += concat("; ", dropped, " left out with nothing to learn");
  if (blank_lines > 0) out += concat("; ", blank_lines, " blank lines");
  if (eos_known)
    out += concat("; ", std::round(1000.0 * static_cast<double>(ends_in_eos) / static_cast<double>(examples)) / 10.0,
                  " % end in a trained EOS");
  if (!ignored_keys.empty()) out += concat("; keys not used: ", ignored_keys);
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
        "The end-of-turn token of the chat template is not a token of this tokenizer: it is learnt as several pieces. "
        "Add it to the tokenizer, or choose the template that belongs to the model.");
  }
  if (straddling > 0) {
    out.push_back(concat(straddling, " tokens hold the end of a prompt and the start of what is trained (first in line ",
                         first_straddling_line,
                         "); they are trained. Move white space from the end of the prompt to the completion."));
  }
  if (truncated * 10 > rows) out.push_back(concat(truncated, " of ", rows, " rows were cut at max_length and lost their end."));
  return out;
}

std::string render_sample(const Example& example, const Tokenizer& tokenizer) {
  GivenTextTools tools(&tokenizer, nullptr);
  return render_sample(example, tools);
}

std::string render_sample(const Example& example, TextTools& tools) {
  std::string out;
  const auto trained = [&](std::size_t i) { return i > 0 && example.labels[i] != Example::kIgnored; };
  for (std::size_t begin = 0; begin < example.input_ids.size();) {
    std::size_t end = begin;
    while (end < example.input_ids.size() && trained(end) == trained(begin)) ++end;
    const std::string text = tools.decode(std::span(example.input_ids).subspan(begin, end - begin), false);
    out += trained(begin) ? concat("«", text, "»") : text;
    begin = end;
  }
  return out;
}

}  // namespace qlorapp
