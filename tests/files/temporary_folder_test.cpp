// SPDX-License-Identifier: Apache-2.0
#include "files/temporary_folder.hpp"

#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "catch.hpp"
#include "files/folder.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;

namespace {

void age(const std::string& folder) {
  const timeval past[2] = {{1, 0}, {1, 0}};
  REQUIRE(::utimes(folder.c_str(), past) == 0);
}

}  // namespace

TEST_CASE("temporary folders go with their owner, and those of killed programs with the next", "[files]") {
  const ::TemporaryFolder root;
  ::setenv("TMPDIR", root.path().c_str(), 1);
  const std::string lost = root / ".qlorapp-temporary-abcdef", other = root / "qlorapp-mine";
  for (const std::string& folder : {lost, other}) {
    files::make_folders("test", folder);
    std::ofstream(files::path_in(folder, "file")) << "x";
    age(folder);
  }
  {
    const files::TemporaryFolder first("test");
    REQUIRE(files::is_folder(first.path()));
    REQUIRE(!files::exists(lost));
    REQUIRE(files::exists(files::path_in(other, "file")));
    age(first.path());
    struct stat status {};
    REQUIRE(::stat(first.path().c_str(), &status) == 0);
    REQUIRE((status.st_mode & 0777) == 0700);
    const files::TemporaryFolder second("test");  // leaves one that is in use
    REQUIRE(files::is_folder(first.path()));
    const pid_t child = ::fork();
    if (child == 0) {
      first.~TemporaryFolder();
      ::_exit(0);
    }
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    REQUIRE(files::is_folder(first.path()));
  }
  REQUIRE(files::names_in(root.path()) == std::vector<std::string>{"qlorapp-mine"});
  ::setenv("TMPDIR", "/nowhere", 1);
  REQUIRE_THROWS_AS(files::TemporaryFolder("test"), IoError);
  ::unsetenv("TMPDIR");
}
