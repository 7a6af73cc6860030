// SPDX-License-Identifier: Apache-2.0
#include "output_folder.hpp"

#include <ftw.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "qlorapp/core/check.hpp"

namespace qlorapp::cli {

namespace fs = std::filesystem;

void check_output_folder(const std::string& folder) {
  std::error_code error;
  QLORAPP_CHECK_VALUE(!fs::exists(folder, error) || fs::is_directory(folder, error), "[output] ", folder,
                      " is a file, not a folder. Name another.");
  // The nearest folder that is there already is the one that has to let us in.
  fs::path place = fs::absolute(folder, error);
  while (!fs::exists(place, error) && place != place.parent_path()) place = place.parent_path();
  const int refused = !fs::is_directory(place, error) ? ENOTDIR : ::access(place.c_str(), W_OK | X_OK) != 0 ? errno : 0;
  if (refused == 0) return;
  throw IoError(
      concat("[output] cannot write to ", folder, ": ", place.string(), ": ", std::strerror(refused), ". Name another folder."),
      refused);
}

FreshFolder::FreshFolder(std::string folder) : folder_(std::move(folder)) {
  check_output_folder(folder_);
  existed_ = fs::exists(folder_);
  QLORAPP_CHECK_VALUE(!existed_ || fs::is_empty(folder_), "[output] ", folder_,
                      " must be new or empty; it is not. Name another folder.");
}

FreshFolder::~FreshFolder() {
  if (kept_) return;
  // Not std::filesystem::remove_all: torch's wheels export another libstdc++'s (see src/io/checkpoint_folder.cpp).
  const auto remove_entry = [](const char* entry, const struct stat*, int, FTW* place) {
    return place->level == 0 ? 0 : std::remove(entry);
  };
  ::nftw(folder_.c_str(), remove_entry, 16, FTW_DEPTH | FTW_PHYS);
  if (!existed_) ::rmdir(folder_.c_str());
}

}  // namespace qlorapp::cli
