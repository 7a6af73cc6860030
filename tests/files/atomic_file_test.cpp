// SPDX-License-Identifier: Apache-2.0
#include "files/atomic_file.hpp"

#include <cerrno>
#include <csignal>
#include <string>

#include <sys/resource.h>
#include <sys/stat.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/faulty_calls.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using namespace qlorapp::files;

TEST_CASE("a written file has the umask's mode, keeps the mode of the file it replaces, and leaves no other", "[files][cpu]") {
  const TemporaryFolder folder;
  const mode_t before = ::umask(027);
  write_file_atomically(folder / "a", "first");
  ::umask(before);
  struct stat status {};
  REQUIRE(::stat((folder / "a").c_str(), &status) == 0);
  REQUIRE((status.st_mode & 0777) == 0640);
  REQUIRE(::chmod((folder / "a").c_str(), 0604) == 0);
  write_file_atomically(folder / "a", std::string("sec\0nd", 6));
  REQUIRE(folder.read("a") == std::string("sec\0nd", 6));
  REQUIRE(::stat((folder / "a").c_str(), &status) == 0);
  REQUIRE((status.st_mode & 0777) == 0604);
  REQUIRE(folder.entries() == 1);
}

TEST_CASE("when any call of a save fails, the error has path and errno, the old file stays and no temporary is left",
          "[files][cpu]") {
  const TemporaryFolder folder;
  const std::string path = folder.write("model", "old");
  const struct {
    const char* call;
    int error;
    int after;
  } rows[] = {{"write", ENOSPC, 0}, {"write", EIO, 2},     {"fsync", EIO, 0},
              {"fsync", EDQUOT, 0}, {"rename", EACCES, 0}, {"rename", ENOSPC, 0}};
  for (const auto& row : rows) {
    int error_number = 0;
    std::string message;
    {
      const WithFaultyCalls faults({.call = row.call, .error = row.error, .after = row.after, .most = 1});
      try {
        write_file_atomically(path, "new");
      } catch (const IoError& error) {
        error_number = error.error_number();
        message = error.what();
      }
    }
    INFO(row.call << ' ' << row.error << ": " << message);
    REQUIRE(error_number == row.error);
    REQUIRE(has(message, path));
    REQUIRE(has(message, "space") == (row.error == ENOSPC || row.error == EDQUOT));
    REQUIRE(folder.read("model") == "old");
    REQUIRE(folder.entries() == 1);
  }
}

TEST_CASE("interrupted and one-byte writes give the same file", "[files][cpu]") {
  const TemporaryFolder folder;
  {
    const WithFaultyCalls faults({.call = "write", .error = EINTR, .after = 3, .once = true, .most = 1});
    write_file_atomically(folder / "a", "0123456789");
  }
  REQUIRE(folder.read("a") == "0123456789");
}

TEST_CASE("room is claimed before the first byte, so a file that cannot fit fails early", "[files][cpu]") {
  const TemporaryFolder folder;
  struct rlimit old {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 4096, old.rlim_max };
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  int error_number = 0;
  try {
    AtomicFile file(folder / "a");
    file.reserve(1 << 20);
    file.write(std::string(1 << 20, 'x'));
    file.commit();
  } catch (const IoError& error) { error_number = error.error_number(); }
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  REQUIRE(error_number == EFBIG);
  REQUIRE(folder.entries() == 0);
}

TEST_CASE("a file that is not committed leaves nothing; a folder that is missing or no folder is said", "[files][cpu]") {
  const TemporaryFolder folder;
  { AtomicFile(folder / "a").write("half"); }
  REQUIRE(folder.entries() == 0);
  REQUIRE(has(thrown<IoError>([&] { write_file_atomically(folder / "no/a", ""); }), "No such file"));
  (void)folder.write("file", "");
  REQUIRE(has(thrown<IoError>([&] { write_file_atomically(folder / "file/a", ""); }), "Not a directory"));
  (void)folder.write("sub/x", "");
  REQUIRE(has(thrown<IoError>([&] { write_file_atomically(folder / "sub", ""); }), "sub"));
}
