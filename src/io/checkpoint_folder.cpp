// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/checkpoint_folder.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kTemporaryPrefix = ".tmp-checkpoint-";
constexpr std::string_view kTrashPrefix = ".trash-checkpoint-";

[[noreturn]] void fail(std::string_view what, const std::string& path, int error) {
  throw IoError(concat("[checkpoint] cannot ", what, " ", path, ": ", std::strerror(error), "."), error);
}

void check(const std::error_code& error, std::string_view what, const std::string& path) {
  if (error) fail(what, path, error.value());
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
  std::error_code error;
  fs::create_directories(output_dir_, error);
  check(error, "make", output_dir_);
  final_ = (fs::path(output_dir_) / concat(kPrefix, step)).string();
  temporary_ = (fs::path(output_dir_) / concat(kTemporaryPrefix, step, "-", ::getpid())).string();
  fs::remove_all(temporary_, error);
  if (!fs::create_directory(temporary_, error)) check(error ? error : std::make_error_code(std::errc::file_exists), "make", temporary_);
}

CheckpointWriter::~CheckpointWriter() {
  if (committed_) return;
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

std::string CheckpointWriter::commit() {
  sync_directory(temporary_);
  std::error_code error;
  std::string trash;
  if (fs::exists(final_, error)) {
    trash = (fs::path(output_dir_) / concat(kTrashPrefix, ::getpid())).string();
    fs::remove_all(trash, error);
    fs::rename(final_, trash, error);
    check(error, "replace", final_);
  }
  fs::rename(temporary_, final_, error);
  check(error, "rename to", final_);
  committed_ = true;
  sync_directory(output_dir_);
  if (!trash.empty()) fs::remove_all(trash, error);
  return final_;
}

std::vector<std::pair<int64_t, std::string>> list_checkpoints(const std::string& output_dir) {
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code error;
  for (fs::directory_iterator it(output_dir, error), end; !error && it != end; it.increment(error)) {
    if (const auto step = step_of(it->path().filename().string()); step && it->is_directory(error)) {
      found.emplace_back(*step, it->path().string());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<std::string> latest_checkpoint(const std::string& output_dir) {
  const auto all = list_checkpoints(output_dir);
  for (auto it = all.rbegin(); it != all.rend(); ++it) {
    std::error_code error;
    if (fs::exists(fs::path(it->second) / "trainer_state.json", error)) return it->second;
  }
  return std::nullopt;
}

void prune_checkpoints(const std::string& output_dir, int64_t limit, const std::string& keep) {
  auto all = list_checkpoints(output_dir);
  int64_t excess = std::ssize(all) - limit;
  for (const auto& [step, path] : all) {
    if (excess <= 0) break;
    std::error_code error;
    if (!keep.empty() && fs::equivalent(path, keep, error)) continue;
    // Out of sight in one step first: a removal that is cut short must not leave half a checkpoint under its name.
    const std::string trash = (fs::path(output_dir) / concat(kTrashPrefix, step, "-", ::getpid())).string();
    fs::rename(path, trash, error);
    check(error, "remove", path);
    fs::remove_all(trash, error);
    --excess;
  }
}

void remove_stale_checkpoints(const std::string& output_dir) {
  std::error_code error;
  std::vector<fs::path> stale;
  for (fs::directory_iterator it(output_dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with(kTemporaryPrefix) || name.starts_with(kTrashPrefix)) stale.push_back(it->path());
  }
  for (const fs::path& path : stale) fs::remove_all(path, error);
}

}  // namespace qlorapp
