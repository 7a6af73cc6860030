// SPDX-License-Identifier: Apache-2.0
/// Rows to be answered: the files that training reads (dataset.hpp), up to the answer. Torch-free.
///
/// A row of a training file is a prompt with a known answer:
///   messages, conversations      what stands before the last message if that is the assistant's, else all of it
///   prompt, completion           the prompt; strings are text as it stands, as in training
///   instruction, output (…)      the question, as in training
///   text                         text to go on with, as it stands
///   input_ids, labels            the tokens before the first that is trained
/// A row that has a prompt alone (a string or messages, and "system") is what `--prompt` takes: a string is a user's message where the model has a
/// chat template. So is a line of a text file. A question ("instruction", "question", "query") needs no answer beside it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/data/dataset.hpp"

namespace qlorapp {

class TextTools;
struct Message;

struct Prompt {
  std::vector<TokenId> ids;
  std::string text;    ///< A string of JSON, a list of messages or of token ids: what the row says.
  std::string answer;  ///< That the row has; empty: none.
  int64_t line = 0;    ///< Where the row begins in its file, from 1.
};

struct PromptOptions {
  DatasetOptions rows;  ///< Of it format, columns and date.
  bool raw = false;     ///< No chat template for strings.
  std::string system;   ///< A message in front of conversations that have none; empty: none.
};

/// The tokens of a conversation up to the answer to its last message.
/// @param date  as DatasetOptions::date_string.  @param functions  tools as JSON; empty: none.
/// @throws ValueError for a conversation that the template refuses. @pre `tools` has a tokenizer and a template.
[[nodiscard]] std::vector<TokenId> ids_of_conversation(std::span<const Message> messages, TextTools& tools,
                                                       const std::optional<std::string>& date = {},
                                                       const std::string& functions = {});

/// @throws ValueError where the model has no chat template and `options.system` is set, or no tokenizer.
[[nodiscard]] Prompt prompt_of(std::string_view text, const PromptOptions& options, TextTools& tools);

/// @throws IoError; FormatError "[file:line] …" for rows of another shape than the first, as Dataset::read.
[[nodiscard]] std::vector<Prompt> read_prompts(const std::string& path, const PromptOptions& options, TextTools& tools);

}  // namespace qlorapp
