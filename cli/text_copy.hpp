// SPDX-License-Identifier: Apache-2.0
/// A private copy of the files of a model folder that transformers opens for a tokenizer.
#pragma once

#include <string>

#include "files/temporary_folder.hpp"

namespace qlorapp::cli {

/// transformers follows links, and opens files that a config names. It gets a folder without both: regular files, read without following
/// links (files::FileReader::open_inside), and a tokenizer_config.json without names of other files. Weights are not copied.
class TextCopy {
 public:
  /// @throws FormatError for a link that leads out of the folder, a pipe, or a tokenizer_config.json that is no JSON; IoError.
  explicit TextCopy(const std::string& folder);

  [[nodiscard]] const std::string& path() const { return copy_.path(); }

 private:
  files::TemporaryFolder copy_;
};

}  // namespace qlorapp::cli
