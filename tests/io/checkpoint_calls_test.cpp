// SPDX-License-Identifier: Apache-2.0
// The order of a checkpoint's system calls, and what is left when one of them fails.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/expect_error.hpp"
#include "io/background_commit.hpp"
#include "io/checkpoint_folder.hpp"
#include "qlorapp/core/log.hpp"

using namespace qlorapp;
using files::path_in;

namespace {

/// This executable's own calls stand before libc's; they are recorded while `recording` is set.
struct Calls {
  bool recording = false, has_exchange = true;
  int renames_left = -1;  ///< Renames that succeed before one fails; -1: none fails.
  std::vector<std::string> made;
};
Calls calls;
std::atomic<bool> holds_flushes = false;  ///< They wait until it is false again.

class Recorded {
 public:
  explicit Recorded(bool has_exchange = true, int renames = -1) { calls = {true, has_exchange, renames, {}}; }
  ~Recorded() { calls.recording = false; }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
};

int rename_recorded(const char* from, const char* to, unsigned flags) {
  if (calls.recording) {
    if (flags != 0 && !calls.has_exchange) {
      errno = EINVAL;
      return -1;
    }
    if (calls.renames_left == 0) {
      errno = EIO;
      return -1;
    }
    --calls.renames_left;
    calls.made.push_back("rename " + files::file_name(from) + " " + files::file_name(to));
  }
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags));
}

void write_content(const std::string& path, const std::string& content) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  REQUIRE(file != nullptr);
  REQUIRE(std::fputs(content.c_str(), file) >= 0);
  REQUIRE(std::fclose(file) == 0);
}

void save_step(RunFolder& run, int64_t step, const std::string& content, const char* name = "run_state.json") {
  CheckpointWriter writer(run, step);
  write_content(path_in(writer.folder(), name), content);
  (void)writer.commit();
}

std::vector<std::string> names_of(const RunFolder& run) {
  std::vector<std::string> names;
  for (const auto& [step, path] : list_checkpoints(run.path())) names.push_back(files::file_name(path));
  return names;
}

std::string newest(const RunFolder& run) { return files::file_name(newest_checkpoint(run.path()).path.value_or("")); }

/// The place of a call; fails if it was not made.
ptrdiff_t place_of(std::string_view call) {
  const auto found = std::find(calls.made.begin(), calls.made.end(), call);
  INFO(call);
  REQUIRE(found != calls.made.end());
  return found - calls.made.begin();
}

}  // namespace

extern "C" {
int rename(const char* from, const char* to) noexcept { return rename_recorded(from, to, 0); }
int renameat2(int, const char* from, int, const char* to, unsigned flags) noexcept { return rename_recorded(from, to, flags); }
int fsync(int file) {
  while (holds_flushes) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (calls.recording) {
    std::array<char, 4096> path{};
    const std::string link = message("/proc/self/fd/{}", file);
    if (::readlink(link.c_str(), path.data(), path.size() - 1) > 0) calls.made.push_back("fsync " + files::file_name(path.data()));
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}
}

TEST_CASE("a checkpoint gets its name after all of it is on the disk, and commit returns after its name is", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  run.begin();
  const std::string parent = files::file_name(folder.path());
  for (const bool replaces : {false, true}) {
    CheckpointWriter writer(run, 4);
    for (const char* name : {"run_state.json", "optimizer.safetensors"}) write_content(path_in(writer.folder(), name), "content");
    const Recorded recorded;
    (void)writer.commit();
    const ptrdiff_t named = place_of("rename .tmp-checkpoint-4 checkpoint-4");
    for (const char* name : {"run_state.json", "optimizer.safetensors"}) REQUIRE(place_of(message("fsync {}", name)) < named);
    const auto manifest = calls.made.begin() + place_of("fsync MANIFEST.json");
    REQUIRE(manifest - calls.made.begin() < named);
    // The entry of the manifest in its folder, too.
    REQUIRE(std::find(manifest, calls.made.begin() + named, "fsync .tmp-checkpoint-4") != calls.made.begin() + named);
    INFO(replaces);
    REQUIRE(calls.made.back() == "fsync " + parent);
    REQUIRE(place_of("fsync " + parent) > named);
  }
}

TEST_CASE("a run's file is on the disk before its folder has a checkpoint", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  const Recorded recorded;
  run.begin();
  const auto named =
      std::find_if(calls.made.begin(), calls.made.end(), [](const auto& call) { return call.ends_with(" run.json"); });
  REQUIRE(named != calls.made.end());
  REQUIRE(std::any_of(calls.made.begin(), named, [](const auto& call) { return call.starts_with("fsync .qlorapp-"); }));
  REQUIRE(std::find(named, calls.made.end(), "fsync " + files::file_name(folder.path())) != calls.made.end());
}

namespace {

std::shared_ptr<CheckpointWriter> written(RunFolder& run, int64_t step) {
  auto writer = std::make_shared<CheckpointWriter>(run, step);
  write_content(path_in(writer->folder(), "run_state.json"), "content");
  return writer;
}

}  // namespace

TEST_CASE("a checkpoint is committed and older ones are pruned while the program goes on", "[io][cpu]") {
  const TemporaryFolder folder;
  const auto run = std::make_shared<RunFolder>(folder.path());
  run->begin();
  for (const int64_t step : {1, 2}) save_step(*run, step, "content");
  BackgroundCommit commit;
  REQUIRE(commit.wait() == std::nullopt);
  holds_flushes = true;
  commit.start(run, written(*run, 3), /*limit=*/2, {folder / "checkpoint-1"});
  REQUIRE(commit.poll() == std::nullopt);
  REQUIRE(names_of(*run) == std::vector<std::string>{"checkpoint-1", "checkpoint-2"});
  holds_flushes = false;
  REQUIRE(commit.wait() == folder / "checkpoint-3");
  REQUIRE(commit.poll() == std::nullopt);  // it was said
  REQUIRE(names_of(*run) == std::vector<std::string>{"checkpoint-1", "checkpoint-3"});
  check_checkpoint(folder / "checkpoint-3");
  commit.start(run, written(*run, 4), std::nullopt, {});
  commit.start(run, written(*run, 5), std::nullopt, {});  // waits for the one before
  std::optional<std::string> path;
  while (!path) path = commit.poll();
  REQUIRE(path == folder / "checkpoint-5");
  REQUIRE(names_of(*run).size() == 4);
}

TEST_CASE("what a commit in the background failed of is thrown once, and leaves nothing", "[io][cpu]") {
  const TemporaryFolder folder;
  const auto run = std::make_shared<RunFolder>(folder.path());
  run->begin();
  BackgroundCommit commit;
  {
    const Recorded recorded(true, /*renames=*/0);
    commit.start(run, written(*run, 1), std::nullopt, {});
    REQUIRE_THROWS_AS(commit.wait(), IoError);
    commit.start(run, written(*run, 2), std::nullopt, {});
    commit.settle();
  }
  REQUIRE(commit.wait() == std::nullopt);
  REQUIRE(folder.entries() == 2);  // run.json and the lock
  commit.start(run, written(*run, 2), std::nullopt, {});
  REQUIRE(commit.wait() == folder / "checkpoint-2");
}

TEST_CASE("where folders cannot be exchanged, a checkpoint is moved aside, and is put back if its successor does not arrive",
          "[io][cpu]") {
  const TemporaryFolder folder;
  {
    RunFolder run(folder.path());
    run.begin();
    save_step(run, 2, "first");
    const Recorded recorded(/*has_exchange=*/false);
    save_step(run, 2, "second");
    REQUIRE(folder.read("checkpoint-2/run_state.json") == "second");
    REQUIRE(folder.entries() == 3);  // the checkpoint, run.json and the lock
  }
  {
    RunFolder run(folder.path());
    run.go_on_from(folder / "checkpoint-2", /*changed=*/false);
    CheckpointWriter writer(run, 2);
    write_content(path_in(writer.folder(), "run_state.json"), "third");
    const Recorded recorded(/*has_exchange=*/false, /*renames=*/2);  // of the manifest and of the old checkpoint
    REQUIRE_THROWS_AS(writer.commit(), IoError);
  }
  const RunFolder run(folder.path());
  REQUIRE(folder.read("checkpoint-2/run_state.json") == "second");
  REQUIRE(newest(run) == "checkpoint-2");
}

TEST_CASE("a checkpoint that is pruned loses its name before its files, and the best one is spared", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  run.begin();
  for (const int64_t step : {1, 2, 3}) save_step(run, step, "content");
  {
    const Recorded recorded(true, /*renames=*/0);
    std::string warned;
    set_log_sink([&](LogLevel, std::string_view line) { warned += line; });
    run.prune(2, {});  // the next save tries again
    set_log_sink({});
    REQUIRE(warned.find("checkpoint-1 is beyond save_total_limit and cannot be removed") != std::string::npos);
  }
  REQUIRE(names_of(run) == std::vector<std::string>{"checkpoint-1", "checkpoint-2", "checkpoint-3"});
  check_checkpoint(folder / "checkpoint-1");
  run.prune(2, {folder / "checkpoint-1"});
  REQUIRE(names_of(run) == std::vector<std::string>{"checkpoint-1", "checkpoint-3"});
  run.prune(1, {});
  REQUIRE(names_of(run) == std::vector<std::string>{"checkpoint-3"});
}

TEST_CASE("a checkpoint that holds only the model, or the files of another step, is not resumed from", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  run.begin();
  save_step(run, 1, "content");
  save_step(run, 2, "content", "adapter_model.safetensors");
  save_step(run, 3, "content");
  REQUIRE(std::rename((folder / "checkpoint-3").c_str(), (folder / "checkpoint-30").c_str()) == 0);
  const NewestCheckpoint found = newest_checkpoint(folder.path());
  REQUIRE(files::file_name(found.path.value_or("")) == "checkpoint-1");
  REQUIRE(found.skipped ==
          std::vector<std::string>{"checkpoint-30 (it holds the files of checkpoint-3)", "checkpoint-2 (it holds only the model)"});
}

TEST_CASE("a run that goes on with changes is another run", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  run.begin();
  save_step(run, 1, "content");
  const std::string first = run.run_id();
  run.go_on_from(folder / "checkpoint-1", /*changed=*/true);
  REQUIRE(run.run_id() != first);
  REQUIRE(newest(run) == "checkpoint-1");
}
