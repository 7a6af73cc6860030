// SPDX-License-Identifier: Apache-2.0
/// The tokenizer and chat template that rows were made with, as files: they belong to every adapter that was trained on these rows.
///
/// The names are those that transformers reads: tokenizer.json, tokenizer_config.json, special_tokens_map.json, vocabularies, merges,
/// chat_template.jinja, additional_chat_templates/*.jinja. Files are held as bytes, so that a result has those of the run's beginning.
/// Torch-free.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qlorapp {

class TextFiles {
 public:
  /// None.
  TextFiles() = default;
  /// Reads a folder's files. @param chat_template  Jinja in place of the folder's templates: chat_template.jinja holds it, and
  /// tokenizer_config.json loses the key. @throws FormatError, IoError: a file that cannot be read, or leads out of the folder.
  explicit TextFiles(const std::string& folder, const std::optional<std::string>& chat_template = std::nullopt);

  /// Whether transformers reads a file of this name ("chat_template.jinja", "additional_chat_templates/rag.jinja") as a part of a tokenizer.
  [[nodiscard]] static bool is_one(std::string_view name);
  /// Whether a folder holds a tokenizer.
  [[nodiscard]] static bool has_tokenizer(const std::string& folder);

  [[nodiscard]] bool empty() const { return files_.empty(); }
  /// Writes whole files. @throws IoError.
  void write(const std::string& folder) const;
  /// The names of a folder's files of text that are none of these. @param vocabularies  false leaves out vocabularies and merges, which say
  /// nothing against others. @throws IoError.
  [[nodiscard]] std::vector<std::string> others_in(const std::string& folder, bool vocabularies = true) const;
  /// The names whose bytes in the folder are others, or that only one side has.
  [[nodiscard]] std::vector<std::string> other_than(const std::string& folder) const;

 private:
  std::vector<std::pair<std::string, std::string>> files_;  ///< Name and bytes, sorted by name.
};

}  // namespace qlorapp
