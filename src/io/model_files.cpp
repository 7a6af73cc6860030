// SPDX-License-Identifier: Apache-2.0
#include "model_files.hpp"

#include <cstddef>

#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "files/manifest.hpp"
#include "io/adapter_base.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestFile = size_t{1} << 30;

bool belongs_to_model(const std::string& file) {
  if (file == files::kManifestName || file == kAdapterBase) return false;
  return (file.ends_with(".json") && file != "config.json" && !file.ends_with(".safetensors.index.json")) ||
         file.ends_with(".jinja") || file.ends_with(".model") || file == "merges.txt" || file.starts_with("LICENSE") ||
         file.starts_with("USE_POLICY");
}

}  // namespace

std::string read_text(const std::string& path) { return files::FileReader::open_inside(path).read_all(kLargestFile); }

void copy_model_files(const std::string& from, const std::string& to) {
  for (const std::string& name : files::names_in(from)) {
    const std::string path = files::path_in(from, name);
    if (belongs_to_model(name) && files::is_regular_file(path))
      files::write_file_atomically(files::path_in(to, name), read_text(path));
  }
}

}  // namespace qlorapp
