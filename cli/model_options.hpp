// SPDX-License-Identifier: Apache-2.0
/// What several commands share: which model, in which precision, with which tokenizer, over which rows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "qlorapp/data/chat_template.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/data/tokenizer.hpp"
#include "qlorapp/io/load_model.hpp"

namespace qlorapp::cli {

struct ModelOptions {
  std::string model;
  std::string quant_type = "nf4";
  std::string device = "auto";
  bool double_quant = true;
  int64_t block_size = 64;
  bool load_in_4bit = true;

  void add_to(CommandLine& line);
  [[nodiscard]] Quantizer::Options quantization() const;
  /// Loads with a progress line on a terminal.
  /// @param embedding_on_host  WeightOptions::embedding_on_host.
  [[nodiscard]] CausalLM load(at::ScalarType compute_dtype, bool embedding_on_host = false) const;
};

/// Tokenizer and chat template of a model folder, opened when rows need them.
struct TextTools {
  std::optional<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat;
  /// @throws FormatError naming the folder and what it lacks.
  static TextTools open(const std::string& folder);
};

/// How files of rows are read and which of their columns are what: of each command with --data.
struct RowOptions {
  std::string data_format = "auto";
  std::string dataset_text_field = "text";
  std::string prompt_column, completion_column, messages_column;

  void add_to(CommandLine& line);
  void apply_to(DatasetOptions& rows) const;
};

/// Reads rows, logs their summary and warnings. Rows of input_ids need no tokenizer.
/// @param path  one file, or several separated by commas, which may differ in format. The summary returned is the first one's.
[[nodiscard]] Dataset read_rows(const std::string& path, const DatasetOptions& options, const std::string& model_folder,
                                std::optional<TextTools>& tools);

/// "float32", "bfloat16", "float16" and their short forms. @throws ValueError with the list.
[[nodiscard]] at::ScalarType parse_dtype(const std::string& text);

}  // namespace qlorapp::cli
