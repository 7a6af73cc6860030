// SPDX-License-Identifier: Apache-2.0
/// One canonical row (row_shape.hpp), checked and turned into tokens and labels. Torch-free.
#pragma once

#include <string>
#include <string_view>

#include "json_reading.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/data/text_tools.hpp"

namespace qlorapp {

/// Holds every row to the format of the first.
class RowEncoder {
 public:
  /// @throws ValueError when the options or what is at hand do not fit the format; `file` stands in messages.
  RowEncoder(RowFormat format, const DatasetOptions& options, TextTools& tools, const std::string& file);

  /// An example whose tokens are not cut yet. @throws FormatError naming `where`.
  [[nodiscard]] Example encode(const Row& row, const std::string& where);

  [[nodiscard]] int64_t straddling() const { return straddling_; }

 private:
  [[nodiscard]] Example encode_ids(const Row& row, const std::string& where) const;
  [[nodiscard]] Example encode_text(const Row& row, const std::string& where);
  [[nodiscard]] Example encode_completion(const Row& row, const std::string& where);
  [[nodiscard]] Example encode_messages(const Row& row, const std::string& where);
  [[nodiscard]] Encoding tokens_of(std::string_view text, bool add_special_tokens, const std::string& where);
  /// Labels the tokens that hold a byte of one of `trained`, which are sorted and disjoint.
  /// @throws FormatError where the tokenizer does not tell which bytes a token has.
  void label(const Encoding& encoding, const std::vector<TextRange>& trained, Example& out, const std::string& where);
  void append_eos(Example& out);

  RowFormat format_;
  const DatasetOptions& options_;
  TextTools& tools_;
  bool completion_only_ = false, assistant_only_ = false;
  int64_t straddling_ = 0;
};

}  // namespace qlorapp
