// SPDX-License-Identifier: Apache-2.0
/// The shape of a data set's rows, decided by the first one: which columns are what. Torch-free.
///
/// A row of any known shape becomes one of five canonical rows, which is all that RowEncoder knows:
///   kInputIds          the row itself
///   kMessages          {"messages": [{"role", "content", …}, …], "tools"?}
///   kPromptCompletion  {"prompt": "…", "completion": "…"}
///   kPromptMessages    {"prompt": [message, …], "completion": [message, …], "tools"?}
///   kText              the row itself, text in DatasetOptions::text_field
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "text/json_reading.hpp"

namespace qlorapp {

class RowShape {
 public:
  /// @param has_template  asked only where it matters: with a chat template, a question and its answer become turns of it, otherwise
  /// Alpaca's text.
  /// @throws FormatError if no known columns are there, naming the way out, and for preference data and images; ValueError if options
  /// name columns for two shapes.
  [[nodiscard]] static RowShape detect(const Row& first_row, const DatasetOptions& options,
                                       const std::function<bool()>& has_template, const std::string& where);

  /// @throws FormatError "[where] …" for a row of another shape.
  [[nodiscard]] Row canonical(Row row, const std::string& where) const;

  /// The column of a prompt ("prompt", or as the options name it) that the row has, and no completion beside it.
  [[nodiscard]] static std::optional<std::string> prompt_alone(const Row& row, const DatasetOptions& options);
  /// Puts an empty answer beside a question that has none, so that canonical() takes the row.
  static void add_missing_answer(Row& row);

  [[nodiscard]] RowFormat format() const { return format_; }
  /// For logs: the form of the rows, and the use of their columns if it is not obvious.
  [[nodiscard]] const std::string& description() const { return description_; }
  /// The columns that canonical() or the encoder looks at.
  [[nodiscard]] const std::vector<std::string>& columns() const { return columns_; }

 private:
  /// A question, what belongs to it, and its answer, in columns of these names.
  struct Instruction {
    std::string question, context, answer;
  };

  RowShape(RowFormat format, std::string description, std::vector<std::string> columns)
      : format_(format), description_(std::move(description)), columns_(std::move(columns)) {}
  [[nodiscard]] static RowShape messages(const Row& row, const std::string& column);
  [[nodiscard]] static RowShape prompt_completion(const Row& row, const std::string& prompt, const std::string& completion,
                                                  const std::string& where);
  [[nodiscard]] static RowShape instruction(const Row& row, Instruction names, bool chat_template);

  void use_system(bool used);
  [[nodiscard]] Row as_turns(Row& row, const std::string& where) const;
  [[nodiscard]] Row as_alpaca_text(Row& row, const std::string& where) const;

  RowFormat format_;
  std::string description_;
  std::vector<std::string> columns_;
  std::string messages_, prompt_, completion_;  ///< Columns; empty where the shape has none.
  bool uses_system_ = false;                    ///< A "system" column is a system message; TRL's own shapes ignore it.
  Instruction instruction_;                     ///< Empty names unless the rows are instructions.
};

}  // namespace qlorapp
