// SPDX-License-Identifier: Apache-2.0
/// What several commands share: which model, in which precision, with which template, over which rows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "folder_text.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/io/load_model.hpp"

namespace qlorapp::cli {

struct ModelOptions {
  std::string model, chat_template;
  std::string quant_type = "nf4";
  std::string device = "auto";
  bool double_quant = true;
  int64_t block_size = 64;
  bool load_in_4bit = true;

  void add_to(CommandLine& line);
  /// --chat_template, for commands that read conversations.
  void add_template_to(CommandLine& line);
  [[nodiscard]] FolderText text_tools() const { return {model, chat_template}; }
  [[nodiscard]] Quantizer::Options quantization() const;
  /// Loads with a progress line on a terminal.
  /// @param embedding_on_host  WeightOptions::embedding_on_host.
  [[nodiscard]] CausalLM load(at::ScalarType compute_dtype, bool embedding_on_host = false) const;
};

/// Reads rows, logs their summary and warnings. Rows of input_ids need neither tokenizer nor template.
[[nodiscard]] Dataset read_rows(const std::string& path, const DatasetOptions& options, FolderText& tools);

/// "float32", "bfloat16", "float16" and their short forms. @throws ValueError with the list.
[[nodiscard]] at::ScalarType parse_dtype(const std::string& text);

}  // namespace qlorapp::cli
