// SPDX-License-Identifier: Apache-2.0
#include "io/checkpoint_folder.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "files/retry.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {
namespace {

using files::path_in;
using files::remove_folder;

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kReplacedPrefix = ".replaced-checkpoint-";  // put back if its replacement is not there
constexpr std::string_view kPrunedPrefix = ".pruned-checkpoint-";
constexpr std::string_view kRunFile = "run.json";

[[noreturn]] void fail(std::string_view what, const std::string& path, int error) {
  throw IoError(message("[checkpoint] cannot {} {}: {}.", what, path, std::strerror(error)), error);
}

void rename(const std::string& from, const std::string& to, std::string_view what, const std::string& path) {
  if (files::retrying([&] { return std::rename(from.c_str(), to.c_str()); }) != 0) fail(what, path, errno);
}

/// Swaps two folders in one step. @returns false where the system or its file system cannot.
bool swap_folders(const std::string& a, const std::string& b) {
  const auto swap = [&] { return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE); };
  if (files::retrying(swap) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) fail("replace", b, errno);
  return false;
}

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  int64_t step = 0;
  const auto [stop, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc{} || stop != name.data() + name.size() || name.empty() || step < 0) return std::nullopt;
  return step;
}

std::string random_id() {
  std::array<uint8_t, 16> bytes{};
  for (size_t have = 0; have < bytes.size();) {
    const ssize_t got = ::getrandom(bytes.data() + have, bytes.size() - have, 0);
    if (got > 0) have += static_cast<size_t>(got);
    if (got < 0 && errno != EINTR) fail("draw an id for the run in", "/dev/urandom", errno);
  }
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

struct RunFile {
  std::string run_id;    ///< Of the run that began in a folder last; empty: none did.
  std::string from;      ///< Checkpoint of this folder that it began from; empty: none.
  std::string from_run;  ///< Which wrote that.
};

RunFile read_run_file(const std::string& output_dir) {
  const std::string path = path_in(output_dir, kRunFile);
  if (!files::exists(path)) return {};
  const format::Json json = files::read_json_inside(path, {.max_bytes = 1 << 16});
  format::JsonFields fields(json, path);
  return {fields.text("run_id").value_or(""), fields.text("from").value_or(""), fields.text("from_run").value_or("")};
}

/// The run that wrote a checkpoint. Empty: transformers' trainer wrote it. None: its manifest is missing or damaged.
std::optional<std::string> run_of(const std::string& checkpoint) {
  try {
    return files::read_manifest(checkpoint).run_id;
  } catch (const Error&) { return std::nullopt; }
}

/// Why a checkpoint cannot be resumed from; empty: it can.
std::string defect(const std::string& checkpoint, const std::string& run_id, bool to_resume) {
  try {
    const files::Manifest manifest = files::read_manifest(checkpoint);
    if (!run_id.empty() && manifest.run_id != run_id) return "of an earlier run";
    // transformers' trainer saved it: the manifest is that of the adapter alone.
    const bool is_output = manifest.kind == files::kOutputKind;
    if (const auto step = step_of(files::file_name(checkpoint)); step && !is_output && *step != manifest.step)
      return message("it holds the files of checkpoint-{}", manifest.step);
    const auto has = [&](std::string_view name) {
      return std::any_of(manifest.files.begin(), manifest.files.end(),
                         [&](const files::ManifestFile& file) { return file.name == name; });
    };
    if (to_resume && !is_output && !has("run_state.json") && !has("optimizer.pt")) return "it holds only the model";
    const std::vector<std::string> lines = files::damage(checkpoint, manifest);
    return lines.empty() ? "" : lines.front();
  } catch (const Error& error) { return first_line(error); }
}

}  // namespace

RunFolder::RunFolder(std::string path) : path_(std::move(path)), lock_(std::in_place, path_) {
  files::remove_left_files(path_);
  for (const std::string& name : files::names_in(path_)) {
    const std::string left = path_in(path_, name);
    if (name.starts_with(kReplacedPrefix)) {
      const std::string place = path_in(path_, message("{}{}", kPrefix, name.substr(kReplacedPrefix.size())));
      if (!files::exists(place)) rename(left, place, "put back", place);
    }
    if (name.starts_with(files::kCheckpointPrefix) || name.starts_with(kReplacedPrefix) || name.starts_with(kPrunedPrefix))
      remove_folder(left);
  }
}

void RunFolder::begin() {
  run_id_ = random_id();
  parent_.clear();
  const auto earlier = list_checkpoints(path_);
  if (!earlier.empty()) {
    log_warning(
        message("[checkpoint] {} holds checkpoints of an earlier run, up to {}. --resume_from_checkpoint true does not use them; a "
                "checkpoint of the same step takes the place of one.",
                path_, files::file_name(earlier.back().second)));
  }
  write_run_file("", "");
}

void RunFolder::go_on_from(const std::string& checkpoint, bool changed) {
  const files::Manifest manifest = files::read_manifest(checkpoint);
  if (manifest.kind == files::kOutputKind) return begin();  // transformers' trainer wrote it, for no run
  run_id_ = manifest.run_id;
  parent_ = files::file_name(checkpoint);
  const auto is_newer = [&](const std::pair<int64_t, std::string>& other) {
    return other.first > manifest.step && run_of(other.second) == run_id_;
  };
  const auto all = list_checkpoints(path_);
  if (changed || std::any_of(all.begin(), all.end(), is_newer)) {
    run_id_ = random_id();
    const bool is_here = files::is_same_file(path_in(path_, parent_), checkpoint);
    write_run_file(is_here ? parent_ : "", is_here ? manifest.run_id : "");
  } else if (read_run_file(path_).run_id != run_id_) {
    write_run_file("", "");
  }
}

void RunFolder::write_run_file(const std::string& from, const std::string& from_run) const {
  const format::Json json{{"run_id", run_id_}, {"from", from}, {"from_run", from_run}};
  files::write_file_atomically(path_in(path_, kRunFile), format::dump_python_json(json, format::kConfigStyle) + "\n");
}

bool RunFolder::owns(const std::string& checkpoint) const { return run_of(checkpoint) == run_id_; }

void RunFolder::prune(int64_t limit, const std::vector<std::string>& keep) const {
  std::vector<std::pair<int64_t, std::string>> own;
  for (auto& checkpoint : list_checkpoints(path_)) {
    const std::optional<std::string> run = run_of(checkpoint.second);
    if (run == run_id_) own.push_back(std::move(checkpoint));
    else if (!run)
      log_warning_once(
          message("[checkpoint] {} has no manifest that can be read, so save_total_limit does not remove it. Remove it "
                  "yourself.",
                  checkpoint.second));
  }
  int64_t excess = std::ssize(own) - limit;
  for (const auto& [step, path] : own) {
    if (excess <= 0) break;
    const auto is_it = [&path = path](const std::string& kept) { return !kept.empty() && files::is_same_file(path, kept); };
    if (std::any_of(keep.begin(), keep.end(), is_it)) continue;
    // Out of sight in one step first: a removal that is cut short must not leave half a checkpoint under its name.
    const std::string pruned = path_in(path_, message("{}{}", kPrunedPrefix, step));
    if (files::retrying([&] { return std::rename(path.c_str(), pruned.c_str()); }) != 0) {
      log_warning(message("[checkpoint] {} is beyond save_total_limit and cannot be removed: {}. The next save tries again.", path,
                          std::strerror(errno)));
    } else {
      remove_folder(pruned);
    }
    --excess;
  }
}

CheckpointWriter::CheckpointWriter(RunFolder& run, int64_t step)
    : run_(&run),
      step_(step),
      final_(path_in(run.path(), message("{}{}", kPrefix, step))),
      temporary_(path_in(run.path(), message("{}{}", files::kCheckpointPrefix, step))) {
  remove_folder(temporary_);
  if (files::retrying([&] { return ::mkdir(temporary_.c_str(), 0777); }) != 0) fail("make", temporary_, errno);
}

void CheckpointWriter::discard() {
  if (!committed_) remove_folder(temporary_);
}

std::string CheckpointWriter::commit() {
  if (!run_->lock_->is_there()) {  // and writing has made the folder again, without the run in it
    remove_folder(temporary_);
    (void)::rmdir(run_->path().c_str());
    throw IoError(message("[output] {} was removed or replaced while the run wrote into it: {}. Start again with another folder.",
                          run_->path(), std::strerror(ENOENT)),
                  ENOENT);
  }
  const files::Manifest manifest{"checkpoint", run_->run_id_, run_->parent_, step_, files::flush_and_describe(temporary_)};
  const std::string manifest_file = path_in(temporary_, files::kManifestName);
  files::write_file_atomically(manifest_file, files::manifest_text(manifest));
  files::flush(manifest_file);
  files::flush(temporary_);
  std::string replaced;
  if (files::exists(final_)) {
    replaced = temporary_;
    if (!swap_folders(temporary_, final_)) {
      replaced = path_in(run_->path(), message("{}{}", kReplacedPrefix, step_));
      rename(final_, replaced, "replace", final_);
      rename(temporary_, final_, "rename to", final_);
    }
  } else {
    rename(temporary_, final_, "rename to", final_);
  }
  committed_ = true;
  files::flush(run_->path());
  if (!replaced.empty()) remove_folder(replaced);
  run_->parent_ = files::file_name(final_);
  return final_;
}

std::vector<std::pair<int64_t, std::string>> list_checkpoints(const std::string& output_dir) {
  std::vector<std::pair<int64_t, std::string>> found;
  for (const std::string& name : files::names_in(output_dir)) {
    std::string path = path_in(output_dir, name);
    if (const auto step = step_of(name); step && files::is_folder(path)) found.emplace_back(*step, std::move(path));
  }
  std::sort(found.begin(), found.end());
  return found;
}

NewestCheckpoint newest_checkpoint(const std::string& output_dir) {
  const RunFile run = read_run_file(output_dir);
  NewestCheckpoint found;
  const auto all = list_checkpoints(output_dir);
  for (auto it = all.rbegin(); it != all.rend() && !found.path; ++it) {
    const std::string why = defect(it->second, run.run_id, /*to_resume=*/true);
    if (why.empty()) {
      found.path = it->second;
    } else if (run.from != files::file_name(it->second)) {
      found.skipped.push_back(message("{} ({})", files::file_name(it->second), why));
    }
  }
  const std::optional<int64_t> begin = step_of(run.from);
  if (found.path || !begin) return found;
  // Nothing of this run is whole: the checkpoint that it began from, or an older one of the same run.
  for (auto it = all.rbegin(); it != all.rend() && !found.path; ++it) {
    if (it->first > *begin) continue;
    const std::string why = defect(it->second, run.from_run, /*to_resume=*/true);
    if (why.empty()) {
      found.path = it->second;
      std::erase_if(found.skipped, [&](const std::string& line) { return line.starts_with(files::file_name(it->second) + " "); });
    } else if (it->first == *begin) {
      found.skipped.push_back(message("{} ({})", run.from, why));
    }
  }
  return found;
}

void check_checkpoint(const std::string& checkpoint) {
  std::string why = defect(checkpoint, "", /*to_resume=*/false);
  if (why.ends_with('.')) why.pop_back();
  QLORAPP_CHECK_FORMAT(
      why.empty(),
      "[resume] {} is damaged: {}. Resume from an older checkpoint: --resume_from_checkpoint true finds the newest that is "
      "whole.",
      checkpoint, why);
}

}  // namespace qlorapp
