// SPDX-License-Identifier: Apache-2.0
#include "file_folders.hpp"

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>

#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"
#include "files/folder.hpp"

namespace qlorapp {
namespace {

class Folders {
 public:
  ~Folders() {
    if (::getpid() != owner_) return;  // a forked process leaves them
    for (const auto& [key, folder] : by_key_) files::remove_folder(folder);
  }

  std::string folder_of(const std::string& path, const std::string& purpose,
                        const std::function<void(const std::string& folder)>& fill) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) throw IoError(message("[model] {} cannot be read.", path), errno);
    const std::string key = message("{} {} {} {} {} {} {}", path, purpose, status.st_dev, status.st_ino, status.st_size,
                                    status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
    const std::lock_guard lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) return found->second;
    const char* const base = std::getenv("TMPDIR");
    std::string folder = files::path_in(base == nullptr || *base == '\0' ? "/tmp" : base, "qlorapp-gguf-XXXXXX");
    if (::mkdtemp(folder.data()) == nullptr)
      throw IoError(message("[model] no folder can be made in {}.", files::parent_of(folder)), errno);
    try {
      fill(folder);
    } catch (...) {
      files::remove_folder(folder);
      throw;
    }
    by_key_.emplace(key, folder);
    return folder;
  }

 private:
  pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::map<std::string, std::string> by_key_;
};

}  // namespace

std::string folder_for_file(const std::string& path, const std::string& purpose,
                            const std::function<void(const std::string& folder)>& fill) {
  static Folders folders;
  return folders.folder_of(path, purpose, fill);
}

}  // namespace qlorapp
