// SPDX-License-Identifier: Apache-2.0
#include "gguf_folders.hpp"

#include <map>
#include <mutex>

namespace qlorapp::format {
namespace {

struct Folders {
  std::mutex mutex;
  std::map<std::string, std::string> files;
};
Folders& folders() {
  static Folders all;
  return all;
}

}  // namespace

void set_gguf_of(const std::string& folder, const std::string& file) {
  const std::lock_guard lock(folders().mutex);
  folders().files[folder] = file;
}

std::string gguf_of(const std::string& folder) {
  const std::lock_guard lock(folders().mutex);
  const auto found = folders().files.find(folder);
  return found == folders().files.end() ? std::string() : found->second;
}

}  // namespace qlorapp::format
