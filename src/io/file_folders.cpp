// SPDX-License-Identifier: Apache-2.0
#include "file_folders.hpp"

#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <sys/stat.h>

#include "core/check.hpp"
#include "files/temporary_folder.hpp"

namespace qlorapp {
namespace {

class Folders {
 public:
  std::string folder_of(const std::string& path, const std::string& purpose,
                        const std::function<void(const std::string& folder)>& fill) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) throw IoError(message("[model] {} cannot be read.", path), errno);
    const std::string key = message("{} {} {} {} {} {} {}", path, purpose, status.st_dev, status.st_ino, status.st_size,
                                    status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
    const std::lock_guard lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) return found->second->path();
    auto folder = std::make_unique<files::TemporaryFolder>("model");
    fill(folder->path());
    return by_key_.emplace(key, std::move(folder)).first->second->path();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<files::TemporaryFolder>> by_key_;
};

}  // namespace

std::string folder_for_file(const std::string& path, const std::string& purpose,
                            const std::function<void(const std::string& folder)>& fill) {
  static Folders folders;
  return folders.folder_of(path, purpose, fill);
}

}  // namespace qlorapp
