// SPDX-License-Identifier: Apache-2.0
/// One canonical row (row_shape.hpp), checked and turned into tokens and labels. Torch-free.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "answers.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/text/text_tools.hpp"
#include "row_message.hpp"
#include "text/json_reading.hpp"
#include "written_parts.hpp"

namespace qlorapp {

/// What the rows had, counted.
struct EncodedRows {
  int64_t straddling = 0;       ///< Tokens; as in DatasetSummary.
  int64_t empty_answers = 0;    ///< Rows with a text, a completion or an assistant's message of nothing but white space.
  int64_t flagged = 0;          ///< Rows of messages with flags of training.
  int64_t misplaced_flags = 0;  ///< Messages of other roles than the assistant that a flag calls trained.
  int64_t rewritten = 0;  ///< Rows of which the template leaves out trained text that it would write in a shorter conversation.
  std::set<std::string> flags = {};  ///< The keys of these flags.
  std::set<std::string> unused_message_keys = {};
};

/// Holds every row to the format of the first.
class RowEncoder {
 public:
  /// @throws ValueError when the options or what is at hand do not fit the format; `file` stands in messages.
  RowEncoder(RowFormat format, const DatasetOptions& options, TextTools& tools, const std::string& file);

  /// @returns the row's examples: one, or several of a conversation (answers.hpp). One has more than max_length tokens if the row has more: it
  /// is not cut yet. @throws FormatError naming `where`.
  [[nodiscard]] std::vector<Example> encode(const Row& row, const std::string& where);

  [[nodiscard]] const EncodedRows& counts() const { return counts_; }

 private:
  [[nodiscard]] Example encode_ids(const Row& row, const std::string& where) const;
  [[nodiscard]] Example encode_text(const Row& row, const std::string& where);
  [[nodiscard]] Example encode_completion(const Row& row, const std::string& where);
  [[nodiscard]] std::vector<Example> encode_messages(const Row& row, const std::string& where);
  /// The row's messages in order. Counts their flags and the keys that the template does not read.
  [[nodiscard]] std::vector<RowMessage> messages_of(const Row& list, const std::string& where);
  /// @param texts    how many of the first messages each text of the row holds.
  /// @param trained  the first message of those whose loss matters; all behind the last answer that is trained do not.
  /// @throws FormatError for text that the template never writes; counts a row with text that it would write in a shorter conversation.
  void check_written(std::span<const Message> messages, const ChatOptions& options, const std::vector<std::size_t>& texts,
                     std::size_t trained, const std::string& where);
  [[nodiscard]] Encoding tokens_of(std::string_view text, bool add_special_tokens, const std::string& where);
  /// The tokens of a sample. White space at the end of the last answer's header and at its own beginning may be one token, which no server
  /// sends and no model answers: then header and answer are encoded apart.
  [[nodiscard]] Encoding served_tokens(const TrainedText& text, const std::string& where);
  /// Labels the tokens that hold a byte of one of `trained`, which are sorted and disjoint.
  /// @throws FormatError where the tokenizer does not tell which bytes a token has.
  void label(const Encoding& encoding, const std::vector<TextRange>& trained, Example& out, const std::string& where);
  void append_eos(Example& out);

  RowFormat format_;
  const DatasetOptions& options_;
  TextTools& tools_;
  bool completion_only_ = false, assistant_only_ = false;
  std::size_t most_ = 0;  ///< Tokens of a row's text that are made.
  EncodedRows counts_;
};

}  // namespace qlorapp
