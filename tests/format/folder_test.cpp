// SPDX-License-Identifier: Apache-2.0
#include "format/folder.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "expect_error.hpp"

namespace format = qlorapp::format;
using format::path_in;

TEST_CASE("a path is put together with one slash, and a name is what follows the last") {
  REQUIRE(path_in("a/b", "c") == "a/b/c");
  REQUIRE(path_in("a/", "c") == "a/c");
  REQUIRE(path_in("", "c") == "c");
  REQUIRE(format::file_name("a/b.json") == "b.json");
  REQUIRE(format::file_name("b.json") == "b.json");
}

TEST_CASE("folders are made with those above them, listed in order, and removed with all in them") {
  const TemporaryFolder folder;
  const std::string root = folder.path();
  const std::string deep = path_in(root, "a/b//c/");
  format::make_folders("test", deep);
  format::make_folders("test", deep);  // what is there is fine
  REQUIRE(format::is_folder(deep));
  (void)folder.write("a/z", "");
  (void)folder.write("a/y", "");
  REQUIRE(::symlink("/", path_in(root, "a/link").c_str()) == 0);
  REQUIRE(format::names_in(path_in(root, "a")) == std::vector<std::string>{"b", "link", "y", "z"});
  REQUIRE(format::names_in(path_in(root, "missing")).empty());
  format::remove_folder(path_in(root, "a"));
  REQUIRE_FALSE(format::exists(path_in(root, "a")));
  REQUIRE(format::is_folder("/"));  // the link went, not what it led to
  format::remove_folder(path_in(root, "a"));
}

TEST_CASE("a folder cannot be made below a file, and the error names it") {
  const TemporaryFolder folder;
  (void)folder.write("file", "");
  const std::string below = path_in(folder.path(), "file/x");
  REQUIRE_THROWS_AS(format::make_folders("test", below), qlorapp::IoError);
  REQUIRE_THROWS_AS(format::check_output_folder(below), qlorapp::IoError);
  REQUIRE_THROWS_AS(format::check_output_folder(path_in(folder.path(), "file")), qlorapp::ValueError);
  format::check_output_folder(path_in(folder.path(), "new/er"));
  format::check_output_folder("relative-and-not-there");
  REQUIRE_FALSE(format::exists(path_in(folder.path(), "new")));
}

TEST_CASE("a fresh folder that is not kept leaves nothing, and what was there before stays") {
  const TemporaryFolder folder;
  const std::string made = path_in(folder.path(), "made"), empty = path_in(folder.path(), "empty");
  REQUIRE(::mkdir(empty.c_str(), 0777) == 0);
  {
    const format::FreshFolder first(made), second(empty);
    (void)folder.write("made/deep/file", "half");
    (void)folder.write("empty/file", "half");
  }
  REQUIRE_FALSE(format::exists(made));
  REQUIRE(format::names_in(empty).empty());
  REQUIRE(format::is_folder(empty));
  {
    format::FreshFolder kept(made);
    (void)folder.write("made/file", "whole");
    kept.keep();
  }
  REQUIRE(format::is_regular_file(path_in(made, "file")));
  REQUIRE_THROWS_AS(format::FreshFolder(made), qlorapp::ValueError);
  REQUIRE(format::is_regular_file(path_in(made, "file")));
}

TEST_CASE("two names of one folder are the same file") {
  const TemporaryFolder folder;
  (void)folder.write("a/x", "");
  (void)folder.write("b/x", "");
  REQUIRE(format::is_same_file(path_in(folder.path(), "a"), path_in(folder.path(), "b/../a")));
  REQUIRE_FALSE(format::is_same_file(path_in(folder.path(), "a"), path_in(folder.path(), "b")));
  REQUIRE_FALSE(format::is_same_file(path_in(folder.path(), "c"), path_in(folder.path(), "c")));
}
