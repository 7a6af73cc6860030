// SPDX-License-Identifier: Apache-2.0
#include "files/folder.hpp"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"

namespace files = qlorapp::files;
using files::path_in;

TEST_CASE("a path is put together with one slash, and a name is what follows the last") {
  REQUIRE(path_in("a/b", "c") == "a/b/c");
  REQUIRE(path_in("a/", "c") == "a/c");
  REQUIRE(path_in("", "c") == "c");
  REQUIRE(files::file_name("a/b.json") == "b.json");
  REQUIRE(files::file_name("b.json") == "b.json");
}

TEST_CASE("folders are made with those above them, listed in order, and removed with all in them") {
  const TemporaryFolder folder;
  const std::string root = folder.path();
  const std::string deep = path_in(root, "a/b//c/");
  files::make_folders("test", deep);
  files::make_folders("test", deep);  // what is there is fine
  REQUIRE(files::is_folder(deep));
  (void)folder.write("a/z", "");
  (void)folder.write("a/y", "");
  REQUIRE(::symlink("/", path_in(root, "a/link").c_str()) == 0);
  REQUIRE(files::names_in(path_in(root, "a")) == std::vector<std::string>{"b", "link", "y", "z"});
  REQUIRE(files::names_in(path_in(root, "missing")).empty());
  files::remove_folder(path_in(root, "a"));
  REQUIRE_FALSE(files::exists(path_in(root, "a")));
  REQUIRE(files::is_folder("/"));  // the link went, not what it led to
  files::remove_folder(path_in(root, "a"));
}

TEST_CASE("a folder cannot be made below a file, and the error names it") {
  const TemporaryFolder folder;
  (void)folder.write("file", "");
  const std::string below = path_in(folder.path(), "file/x");
  REQUIRE_THROWS_AS(files::make_folders("test", below), qlorapp::IoError);
  REQUIRE_THROWS_AS(files::check_output_folder(below), qlorapp::IoError);
  REQUIRE_THROWS_AS(files::check_output_folder(path_in(folder.path(), "file")), qlorapp::ValueError);
  files::check_output_folder(path_in(folder.path(), "new/er"));
  files::check_output_folder("relative-and-not-there");
  REQUIRE_FALSE(files::exists(path_in(folder.path(), "new")));
}

namespace {

void write_into(const files::FreshFolder& folder, const std::string& name) {
  std::FILE* file = std::fopen(path_in(folder.path(), name).c_str(), "w");
  REQUIRE(file != nullptr);
  REQUIRE(std::fputs("content", file) >= 0);
  REQUIRE(std::fclose(file) == 0);
}

}  // namespace

TEST_CASE("what a killed program left in a fresh folder goes, and files that came after it stay") {
  const TemporaryFolder folder;
  const std::string made = path_in(folder.path(), "made");
  const auto killed = [&](bool committed) {
    const pid_t child = ::fork();
    if (child == 0) {
      files::FreshFolder fresh(made);
      std::FILE* file = std::fopen(path_in(fresh.path(), "config.json").c_str(), "w");
      (void)std::fputs("half", file);
      (void)std::fclose(file);
      if (committed) {  // as a kill before the mark is removed leaves it
        const std::string mark = path_in(made, ".qlorapp-unfinished"), aside = mark + "-aside";
        if (::link(mark.c_str(), aside.c_str()) != 0) ::_exit(1);
        fresh.keep();
        if (::rename(aside.c_str(), mark.c_str()) != 0) ::_exit(1);
      }
      ::kill(::getpid(), SIGKILL);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
  };
  for (const bool committed : {false, true}) {
    killed(committed);
    REQUIRE(files::exists(path_in(made, "config.json")) == committed);
    files::FreshFolder fresh(made);
    REQUIRE_FALSE(files::exists(path_in(made, "config.json")));
  }
  killed(false);
  (void)folder.write("made/thesis.txt", "mine");
  REQUIRE_THROWS_AS(files::FreshFolder(made), qlorapp::ValueError);
  REQUIRE(folder.read("made/thesis.txt") == "mine");
}

TEST_CASE("a folder that cannot be read is no empty folder") {
  const TemporaryFolder folder;
  (void)folder.write("a", "");
  REQUIRE(files::names_in(path_in(folder.path(), "missing")).empty());
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{0, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  bool refused = false;
  try {
    (void)files::names_in(folder.path());
  } catch (const qlorapp::IoError&) { refused = true; }
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(refused);
}

TEST_CASE("a fresh folder that is not kept leaves nothing, and what was there before stays") {
  const TemporaryFolder folder;
  const std::string made = path_in(folder.path(), "made"), empty = path_in(folder.path(), "empty");
  REQUIRE(::mkdir(empty.c_str(), 0777) == 0);
  {
    const files::FreshFolder first(made), second(empty);
    write_into(first, "file");
    write_into(second, "file");
    REQUIRE_THROWS_AS(files::FreshFolder(made), qlorapp::IoError);  // another program would be refused
  }
  REQUIRE_FALSE(files::exists(made));
  REQUIRE(files::names_in(empty).empty());
  REQUIRE(files::is_folder(empty));
  {
    files::FreshFolder kept(made);
    write_into(kept, "file");
    REQUIRE_FALSE(files::exists(path_in(made, "file")));
    kept.keep();
  }
  REQUIRE(files::names_in(made) == std::vector<std::string>{"MANIFEST.json", "file"});
  (void)folder.write("made/.qlorapp-pending/.qlorapp-files", "file\n");  // all is in place; removing this had failed
  REQUIRE_THROWS_AS(files::FreshFolder(made), qlorapp::ValueError);
  REQUIRE(files::names_in(made) == std::vector<std::string>{"MANIFEST.json", "file"});
}

TEST_CASE("two names of one folder are the same file") {
  const TemporaryFolder folder;
  (void)folder.write("a/x", "");
  (void)folder.write("b/x", "");
  REQUIRE(files::is_same_file(path_in(folder.path(), "a"), path_in(folder.path(), "b/../a")));
  REQUIRE_FALSE(files::is_same_file(path_in(folder.path(), "a"), path_in(folder.path(), "b")));
  REQUIRE_FALSE(files::is_same_file(path_in(folder.path(), "c"), path_in(folder.path(), "c")));
}
