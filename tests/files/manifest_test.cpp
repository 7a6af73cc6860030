// SPDX-License-Identifier: Apache-2.0
// Checksums, manifests, locks, and files that are replaced together.
#include "files/manifest.hpp"

#include <cerrno>
#include <csignal>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/checksum.hpp"
#include "files/faulty_calls.hpp"
#include "files/folder.hpp"
#include "files/folder_lock.hpp"
#include "files/folder_update.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using namespace qlorapp::files;

namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string sha256(std::string_view text) {
  Sha256 sum;
  sum.update(bytes(text));
  return sum.digest();
}

Manifest described(const TemporaryFolder& folder) {
  return {"checkpoint", std::string(32, 'a'), "checkpoint-2", 4, flush_and_describe(folder.path())};
}

constexpr const char* kGuard = "config";

/// @returns the path of a new file of the update.
std::string write_new(const FolderUpdate& update, const char* name) {
  std::string path = path_in(update.staging(), name);
  FILE* file = std::fopen(path.c_str(), "w");
  (void)std::fputs("new", file);
  (void)std::fclose(file);
  return path;
}

}  // namespace

TEST_CASE("checksums are those of the standards, however the bytes come", "[files][cpu]") {
  REQUIRE(crc32c(bytes("123456789")) == 0xe3069283);  // RFC 3720's check value
  REQUIRE(crc32c(bytes("")) == 0);
  REQUIRE(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");  // FIPS 180-4's examples
  REQUIRE(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * 7);
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{7}, size_t{63}, size_t{64}, size_t{65}, size_t{999}}) {
    const std::string_view whole = text;
    REQUIRE(crc32c(bytes(whole.substr(cut)), crc32c(bytes(whole.substr(0, cut)))) == crc32c(bytes(whole)));
    Sha256 sum;
    sum.update(bytes(whole.substr(0, cut)));
    sum.update(bytes(whole.substr(cut)));
    REQUIRE(sum.digest() == sha256(text));
  }
}

TEST_CASE("a manifest finds each flipped bit of each file, of its own text too, and files that are missing or have another size",
          "[files][cpu]") {
  const TemporaryFolder folder;
  (void)folder.write("a", "some content of a file");
  (void)folder.write("below/b", std::string(5'000'000, 'x'));
  (void)folder.write("empty", "");
  const Manifest manifest = described(folder);
  REQUIRE(manifest.files.size() == 3);
  REQUIRE(manifest.files[1].name == "below/b");
  REQUIRE(manifest.files[1].crc32c.size() == 2);  // of 4 MiB and the rest
  const std::string text = manifest_text(manifest);
  (void)folder.write("MANIFEST.json", text);
  REQUIRE(damage(folder.path(), read_manifest(folder.path())).empty());

  const std::string content = folder.read("a");
  for (size_t bit = 0; bit < content.size() * 8; ++bit) {
    std::string flipped = content;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    (void)folder.write("a", flipped);
    REQUIRE(damage(folder.path(), manifest) == std::vector<std::string>{"a: its bytes from 0 on were changed"});
  }
  (void)folder.write("a", content + "!");
  REQUIRE(has(damage(folder.path(), manifest).at(0), "23 bytes and was written with 22"));
  (void)folder.write("a", content);
  std::string large = folder.read("below/b");
  large[4'999'999] = 'y';
  (void)folder.write("below/b", large);
  REQUIRE(damage(folder.path(), manifest) == std::vector<std::string>{"below/b: its bytes from 4194304 on were changed"});
  REQUIRE(::unlink((folder / "empty").c_str()) == 0);
  REQUIRE(damage(folder.path(), manifest).back() == "empty: it is missing");

  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    REQUIRE(has(thrown<FormatError>([&] { (void)parse_manifest(flipped, "M"); }), "M"));
  }
}

TEST_CASE("a manifest that names files outside of its folder, or is of a newer version, is refused", "[files][cpu]") {
  const TemporaryFolder folder;
  REQUIRE(has(thrown<FormatError>([&] { (void)read_manifest(folder.path()); }), "never finished"));
  for (const char* name : {"../x", "/x", "a/../x", "a//b", ".", "MANIFEST.json", ""}) {
    const Manifest manifest{"checkpoint", std::string(32, 'a'), "", 1, {{name, 0, std::string(64, '0'), {}}}};
    REQUIRE(has(thrown<FormatError>([&] { (void)parse_manifest(manifest_text(manifest), "M"); }), "inside the folder"));
  }
  REQUIRE(has(thrown<FormatError>([&] { (void)parse_manifest(R"({"schema": 2})", "M"); }), "this version reads 1"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  REQUIRE(has(thrown<FormatError>([&] { (void)flush_and_describe(folder.path()); }), "regular files only"));
}

TEST_CASE("a folder has one writer; a dead one's lock is taken over", "[files][cpu]") {
  const TemporaryFolder folder;
  const std::string path = folder / "run";
  {
    const FolderLock lock(path);
    REQUIRE_FALSE(lock.was_left());
    const std::string refused = thrown<IoError>([&] { const FolderLock second(path); });
    REQUIRE(has(refused, "in use by another run"));
    REQUIRE(has(refused, message("process {}", static_cast<int64_t>(::getpid()))));
  }
  REQUIRE_FALSE(exists(path));  // it was made for the lock, and nothing was written into it
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(path);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(exists(path + "/.qlorapp.lock"));
  REQUIRE(FolderLock(path).was_left());
  REQUIRE_FALSE(exists(path + "/.qlorapp.lock"));
}

TEST_CASE("files are replaced together: after a failure of any call, all are the old ones or all become the new ones",
          "[files][cpu]") {
  int points = 0;
  for (const char* call : {"rename", "fsync"}) {
    for (int after = 0;; ++after) {
      const TemporaryFolder folder;
      (void)folder.write("config", "old config");
      (void)folder.write("weights", "old weights");
      (void)folder.write("other", "stays");
      bool failed = false;
      {
        const WithFaultyCalls faults({.call = call, .error = EIO, .after = after});
        try {
          FolderUpdate update(folder.path(), kGuard);
          for (const char* name : {"config", "weights", "new"}) (void)write_new(update, name);
          update.commit();
        } catch (const IoError&) { failed = true; }
      }
      INFO(call << " fails after " << after);
      const bool mixed = folder.read("config") != "" && (folder.read("config") == "new") != (folder.read("weights") == "new");
      REQUIRE_FALSE(mixed);  // for one who only reads
      finish_update(folder.path(), kGuard);
      const std::string version = folder.read("config");
      REQUIRE((version == "new" || version == "old config"));
      REQUIRE(folder.read("weights") == (version == "new" ? "new" : "old weights"));
      REQUIRE(folder.read("other") == "stays");
      REQUIRE(folder.entries() == (version == "new" ? 5 : 3));
      if (version == "new") REQUIRE(damage(folder.path(), read_manifest(folder.path())).empty());
      if (!failed) {
        REQUIRE(version == "new");
        break;
      }
      ++points;
    }
  }
  REQUIRE(points > 8);
}

TEST_CASE("an unfinished save of a stranger moves nothing into or out of the folder", "[files][cpu]") {
  const TemporaryFolder folder, outside;
  (void)outside.write("key", "secret");
  (void)folder.write("config", "old");
  const std::string pending = folder / ".qlorapp-pending";
  const auto refuses = [&] {
    REQUIRE_THROWS_AS(finish_update(folder.path(), kGuard), FormatError);
    REQUIRE(outside.read("key") == "secret");
    REQUIRE(outside.entries() == 1);
    REQUIRE(folder.read("config") == "old");
    remove_folder(pending);
  };
  SECTION("it has no list of its files") {
    (void)folder.write(".qlorapp-pending/config", "new");
    refuses();
  }
  SECTION("a folder of it is a link") {
    (void)folder.write(".qlorapp-pending/.qlorapp-files", "sub/key\n");
    REQUIRE(::symlink(outside.path().c_str(), (pending + "/sub").c_str()) == 0);
    refuses();
  }
  SECTION("a folder that it writes into is a link") {
    (void)folder.write(".qlorapp-pending/.qlorapp-files", "sub/key\n");
    (void)folder.write(".qlorapp-pending/sub/key", "theirs");
    REQUIRE(::symlink(outside.path().c_str(), (folder / "sub").c_str()) == 0);
    refuses();
  }
  SECTION("a name leads out") {
    (void)folder.write(".qlorapp-pending/.qlorapp-files", "../key\n");
    refuses();
  }
  SECTION("a file of it is a link") {
    (void)folder.write(".qlorapp-pending/.qlorapp-files", "config\n");
    REQUIRE(::symlink((outside / "key").c_str(), (pending + "/config").c_str()) == 0);
    refuses();
  }
}

TEST_CASE("a clock that is set back during a save does not make its files look like those of another", "[files][cpu]") {
  const TemporaryFolder folder;
  (void)folder.write("config", "old");
  (void)folder.write("weights", "old");
  {
    const WithFaultyCalls faults(
        {.call = "rename", .error = EIO, .after = 5});  // the manifest, the list, the folder, two of the files
    FolderUpdate update(folder.path(), kGuard);
    for (const char* name : {"config", "weights", "more"}) {
      const std::string path = write_new(update, name);
      const timespec later[2] = {{4'000'000'000, 0}, {4'000'000'000, 0}};
      REQUIRE(::utimensat(AT_FDCWD, path.c_str(), later, 0) == 0);
    }
    REQUIRE_THROWS_AS(update.commit(), IoError);
  }
  REQUIRE(exists(folder / ".qlorapp-pending"));
  REQUIRE((folder.read("weights") == "new" || exists(folder / "more")));
  finish_update(folder.path(), kGuard);
  for (const char* name : {"config", "weights", "more"}) REQUIRE(folder.read(name) == "new");
}

TEST_CASE("an update whose files are in place is over, though its folder is still there", "[files][cpu]") {
  const TemporaryFolder folder;
  (void)folder.write("config", "new");
  REQUIRE(::mkdir((folder / ".qlorapp-pending").c_str(), 0777) == 0);
  REQUIRE(::mkdir((folder / ".qlorapp-pending/sub").c_str(), 0777) == 0);
  finish_update(folder.path(), kGuard);
  REQUIRE(folder.read("config") == "new");
  REQUIRE(folder.entries() == 1);
}

TEST_CASE("an interrupted save gives way to a later one of another program", "[files][cpu]") {
  const TemporaryFolder folder;
  (void)folder.write(".qlorapp-pending/.qlorapp-files", "config\nweights\n");
  (void)folder.write(".qlorapp-pending/weights", "interrupted");
  (void)folder.write("config", "interrupted");  // this one had taken its place
  const auto set_time = [](const std::string& path, time_t seconds) {
    const timespec times[2] = {{seconds, 0}, {seconds, 0}};
    REQUIRE(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
  };
  set_time(folder / ".qlorapp-pending/.qlorapp-files", 1000);
  set_time(folder / "config", 999);
  SECTION("none came") {
    finish_update(folder.path(), kGuard);
    REQUIRE(folder.read("weights") == "interrupted");
  }
  SECTION("one came") {
    (void)folder.write("weights", "later");
    (void)folder.write("config", "later");
    set_time(folder / "weights", 1001);
    finish_update(folder.path(), kGuard);
    REQUIRE(folder.read("weights") == "later");
  }
  REQUIRE_FALSE(exists(folder / ".qlorapp-pending"));
}

TEST_CASE("an output's manifest has its new files as they are and its others as they were; a checkpoint gets none",
          "[files][cpu]") {
  const TemporaryFolder folder;
  (void)folder.write("first", "1");
  (void)folder.write("second", "2");
  const auto updated = [&](const std::vector<std::string>& names) {
    (void)folder.write("MANIFEST.json", output_manifest(folder.path(), folder.path(), names).value());
    return read_manifest(folder.path());
  };
  REQUIRE(updated({"first", "second"}).kind == "output");
  (void)folder.write("second", "two");
  (void)folder.write("third\nline", "3");
  REQUIRE(damage(folder.path(), read_manifest(folder.path())) ==
          std::vector<std::string>{"second: it has 3 bytes and was written with 1"});
  const Manifest manifest = updated({"second", "third\nline", std::string("no\xff text")});
  REQUIRE(damage(folder.path(), manifest).empty());
  std::vector<std::string> names;
  for (const ManifestFile& file : manifest.files) names.push_back(file.name);
  REQUIRE(names == std::vector<std::string>{"first", "second", "third\nline"});
  REQUIRE(::unlink((folder / "first").c_str()) == 0);
  REQUIRE(updated({"second"}).files.size() == 2);
  std::string text = folder.read("MANIFEST.json");
  (void)folder.write("MANIFEST.json", text.replace(text.find("output"), 1, "O"));  // no longer what it was sealed as
  REQUIRE(updated({"second"}).files.size() == 1);
  (void)folder.write("MANIFEST.json", manifest_text(described(folder)));
  REQUIRE_FALSE(output_manifest(folder.path(), folder.path(), {"second"}));
}

TEST_CASE("names with line ends are files of an update; a list of lines of an older version is finished", "[files][cpu]") {
  const TemporaryFolder folder;
  {
    FolderUpdate update(folder.path(), kGuard);
    for (const char* name : {"two\nlines", "config"}) (void)write_new(update, name);
    update.commit();
  }
  REQUIRE(folder.read("two\nlines") == "new");
  (void)folder.write(".qlorapp-pending/.qlorapp-files", "weights\nconfig\n");
  (void)folder.write(".qlorapp-pending/weights", "older");
  (void)folder.write(".qlorapp-pending/config", "older");
  finish_update(folder.path(), kGuard);
  REQUIRE(folder.read("weights") == "older");
  REQUIRE(folder.read("config") == "older");
  REQUIRE(names_of_list(name_list({"a\nb", "c"})) == std::vector<std::string>{"a\nb", "c"});
}

TEST_CASE("a retired file goes with the next update if an earlier one put it there, and is not in the manifest", "[files][cpu]") {
  const TemporaryFolder folder;
  {
    FolderUpdate update(folder.path(), kGuard);
    for (const char* name : {kGuard, "old", "kept"}) (void)write_new(update, name);
    update.commit();
  }
  (void)folder.write("mine", "of the user");
  FolderUpdate update(folder.path(), kGuard);
  (void)write_new(update, kGuard);
  for (const char* name : {"old", "mine", "never"}) update.retire(name);
  REQUIRE(exists(folder / "old"));
  update.commit();
  REQUIRE_FALSE(exists(folder / "old"));
  REQUIRE(exists(folder / "mine"));
  const Manifest manifest = read_manifest(folder.path());
  REQUIRE(manifest.files.size() == 2);
  REQUIRE(damage(folder.path(), manifest).empty());
}
