// SPDX-License-Identifier: Apache-2.0
#include "io/checkpoint_folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "core/check.hpp"
#include "format/folder.hpp"

namespace qlorapp {
namespace {

using format::path_in;
using format::remove_folder;

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kTemporaryPrefix = ".tmp-checkpoint-";
constexpr std::string_view kTrashPrefix = ".trash-checkpoint-";

[[noreturn]] void fail(std::string_view what, const std::string& path, int error) {
  throw IoError(message("[checkpoint] cannot {} {}: {}.", what, path, std::strerror(error)), error);
}

void rename(const std::string& from, const std::string& to, std::string_view what, const std::string& path) {
  if (std::rename(from.c_str(), to.c_str()) != 0) fail(what, path, errno);
}

/// Makes the entries of a directory durable.
void sync_directory(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail("open", path, errno);
  const int failed = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (failed != 0 && failed != EINVAL) fail("flush", path, failed);  // EINVAL: a file system without directory sync
}

std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* const begin = name.data() + kPrefix.size();
  const char* const end = name.data() + name.size();
  int64_t step = 0;
  const auto [stop, error] = std::from_chars(begin, end, step);
  if (error != std::errc{} || stop != end || begin == end || step < 0) return std::nullopt;
  return step;
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string output_dir, int64_t step) : output_dir_(std::move(output_dir)) {
  format::make_folders("checkpoint", output_dir_);
  final_ = path_in(output_dir_, message("{}{}", kPrefix, step));
  temporary_ = path_in(output_dir_, message("{}{}-{}", kTemporaryPrefix, step, ::getpid()));
  remove_folder(temporary_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) fail("make", temporary_, errno);
}

CheckpointWriter::~CheckpointWriter() {
  if (committed_) return;
  remove_folder(temporary_);
}

std::string CheckpointWriter::commit() {
  sync_directory(temporary_);
  std::string trash;
  if (format::exists(final_)) {
    trash = path_in(output_dir_, message("{}{}", kTrashPrefix, ::getpid()));
    remove_folder(trash);
    rename(final_, trash, "replace", final_);
  }
  rename(temporary_, final_, "rename to", final_);
  committed_ = true;
  sync_directory(output_dir_);
  if (!trash.empty()) remove_folder(trash);
  return final_;
}

std::vector<std::pair<int64_t, std::string>> list_checkpoints(const std::string& output_dir) {
  std::vector<std::pair<int64_t, std::string>> found;
  for (const std::string& name : format::names_in(output_dir)) {
    std::string path = path_in(output_dir, name);
    if (const auto step = step_of(name); step && format::is_folder(path)) found.emplace_back(*step, std::move(path));
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<std::string> latest_checkpoint(const std::string& output_dir) {
  const auto all = list_checkpoints(output_dir);
  for (auto it = all.rbegin(); it != all.rend(); ++it) {
    if (format::exists(path_in(it->second, "trainer_state.json"))) return it->second;
  }
  return std::nullopt;
}

void prune_checkpoints(const std::string& output_dir, int64_t limit, const std::vector<std::string>& keep) {
  auto all = list_checkpoints(output_dir);
  int64_t excess = std::ssize(all) - limit;
  for (const auto& [step, path] : all) {
    if (excess <= 0) break;
    const auto is_it = [&path = path](const std::string& kept) { return !kept.empty() && format::is_same_file(path, kept); };
    if (std::any_of(keep.begin(), keep.end(), is_it)) continue;
    // Out of sight in one step first: a removal that is cut short must not leave half a checkpoint under its name.
    const std::string trash = path_in(output_dir, message("{}{}-{}", kTrashPrefix, step, ::getpid()));
    rename(path, trash, "remove", path);
    remove_folder(trash);
    --excess;
  }
}

void remove_stale_checkpoints(const std::string& output_dir) {
  for (const std::string& name : format::names_in(output_dir)) {
    if (name.starts_with(kTemporaryPrefix) || name.starts_with(kTrashPrefix)) remove_folder(path_in(output_dir, name));
  }
}

}  // namespace qlorapp
