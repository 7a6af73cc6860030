// SPDX-License-Identifier: Apache-2.0
#include "io/checkpoint_folder.hpp"

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using files::path_in;

namespace {

void write(const std::string& path, const std::string& content) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  REQUIRE(file != nullptr);
  REQUIRE(std::fputs(content.c_str(), file) >= 0);
  REQUIRE(std::fclose(file) == 0);
}

std::string save(RunFolder& run, int64_t step, const std::string& content) {
  CheckpointWriter writer(run, step);
  write(path_in(writer.folder(), "run_state.json"), content);
  return writer.commit();
}

std::vector<std::string> steps(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& [step, path] : list_checkpoints(folder)) names.push_back(files::file_name(path));
  return names;
}

}  // namespace

TEST_CASE("a new run in an old folder does not resume from the old run's checkpoints, and does not remove them", "[io][cpu]") {
  const TemporaryFolder folder;
  {
    RunFolder old(folder.path());
    old.begin();
    for (const int64_t step : {2, 4}) (void)save(old, step, "old");
  }
  RunFolder run(folder.path());
  run.begin();
  const NewestCheckpoint none = newest_checkpoint(folder.path());
  REQUIRE_FALSE(none.path.has_value());
  REQUIRE(none.skipped == std::vector<std::string>{"checkpoint-4 (of an earlier run)", "checkpoint-2 (of an earlier run)"});
  (void)save(run, 1, "new");
  (void)save(run, 3, "new");
  REQUIRE(files::file_name(newest_checkpoint(folder.path()).path.value_or("")) == "checkpoint-3");
  run.prune(1, {});
  REQUIRE(steps(folder.path()) == std::vector<std::string>{"checkpoint-2", "checkpoint-3", "checkpoint-4"});
}

TEST_CASE("resuming takes the newest checkpoint that is whole and names those that it skips", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  run.begin();
  for (const int64_t step : {1, 2, 3, 4}) (void)save(run, step, "content");
  write(folder / "checkpoint-4/run_state.json", "CONTENT");
  REQUIRE(::unlink((folder / "checkpoint-3/run_state.json").c_str()) == 0);
  const NewestCheckpoint newest = newest_checkpoint(folder.path());
  REQUIRE(files::file_name(newest.path.value_or("")) == "checkpoint-2");
  REQUIRE(newest.skipped == std::vector<std::string>{"checkpoint-4 (run_state.json: its bytes from 0 on were changed)",
                                                     "checkpoint-3 (run_state.json: it is missing)"});
  REQUIRE(has(thrown<FormatError>([&] { check_checkpoint(folder / "checkpoint-4"); }), "is damaged: run_state.json"));
  check_checkpoint(folder / "checkpoint-2");
}

TEST_CASE("a checkpoint of the same step is replaced in one step; one that is not committed leaves nothing", "[io][cpu]") {
  const TemporaryFolder folder;
  RunFolder run(folder.path());
  run.begin();
  (void)save(run, 2, "first");
  (void)save(run, 2, "second");
  REQUIRE(folder.read("checkpoint-2/run_state.json") == "second");
  { const CheckpointWriter abandoned(run, 3); }
  REQUIRE(steps(folder.path()) == std::vector<std::string>{"checkpoint-2"});
  REQUIRE(folder.entries() == 3);  // the checkpoint, run.json and the lock
}

TEST_CASE("the next run puts back what an interrupted replacement moved away, and removes litter", "[io][cpu]") {
  const TemporaryFolder folder;
  {
    RunFolder run(folder.path());
    run.begin();
    (void)save(run, 2, "two");
    (void)save(run, 3, "three");
  }
  // As a system without RENAME_EXCHANGE leaves it when it is killed between the two renames.
  REQUIRE(std::rename((folder / "checkpoint-3").c_str(), (folder / ".replaced-checkpoint-3").c_str()) == 0);
  (void)folder.write(".tmp-checkpoint-3/run_state.json", "half");
  (void)folder.write(".pruned-checkpoint-1/state", "half");
  const RunFolder run(folder.path());
  REQUIRE(steps(folder.path()) == std::vector<std::string>{"checkpoint-2", "checkpoint-3"});
  REQUIRE(folder.read("checkpoint-3/run_state.json") == "three");
  REQUIRE(folder.entries() == 4);
}

TEST_CASE("a run that goes back to an older checkpoint gets an id of its own, and is resumed from there until it has saved",
          "[io][cpu]") {
  const TemporaryFolder folder;
  std::string first;
  {
    RunFolder run(folder.path());
    run.begin();
    first = run.run_id();
    for (const int64_t step : {1, 2, 3}) (void)save(run, step, "first");
  }
  {
    RunFolder run(folder.path());
    run.go_on_from(folder / "checkpoint-3", /*changed=*/false);
    REQUIRE(run.run_id() == first);
  }
  RunFolder run(folder.path());
  run.go_on_from(folder / "checkpoint-1", /*changed=*/false);
  REQUIRE(run.run_id() != first);
  REQUIRE(files::file_name(newest_checkpoint(folder.path()).path.value_or("")) == "checkpoint-1");
  (void)save(run, 2, "second");
  REQUIRE(files::file_name(newest_checkpoint(folder.path()).path.value_or("")) == "checkpoint-2");
  REQUIRE(folder.read("checkpoint-2/run_state.json") == "second");
}

TEST_CASE("a run whose beginning is damaged is resumed from an older checkpoint of the run before it", "[io][cpu]") {
  const TemporaryFolder folder;
  {
    RunFolder run(folder.path());
    run.begin();
    for (const int64_t step : {1, 2, 3}) (void)save(run, step, "first");
  }
  {
    RunFolder run(folder.path());
    run.go_on_from(folder / "checkpoint-2", /*changed=*/true);
  }
  write(folder / "checkpoint-2/run_state.json", "FIRST");
  const NewestCheckpoint newest = newest_checkpoint(folder.path());
  REQUIRE(files::file_name(newest.path.value_or("")) == "checkpoint-1");
  REQUIRE(newest.skipped == std::vector<std::string>{"checkpoint-3 (of an earlier run)",
                                                     "checkpoint-2 (run_state.json: its bytes from 0 on were changed)"});
}

TEST_CASE("a checkpoint does not make an output folder again that somebody has removed", "[io][cpu]") {
  const TemporaryFolder folder;
  const std::string out = path_in(folder.path(), "out");
  RunFolder run(out);
  run.begin();
  (void)save(run, 1, "whole");
  CheckpointWriter writer(run, 2);
  std::filesystem::remove_all(out);
  std::filesystem::create_directories(writer.folder());  // as an adapter's writer does
  write(path_in(writer.folder(), "run_state.json"), "alone");
  REQUIRE(has(thrown<IoError>([&] { (void)writer.commit(); }), "was removed or replaced while the run wrote into it"));
  REQUIRE_FALSE(files::exists(out));
}
