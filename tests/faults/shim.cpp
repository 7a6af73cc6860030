// SPDX-License-Identifier: Apache-2.0
// Stands before libc (LD_PRELOAD) and makes one file call of a program fail, or kills the program there, or writes a log of all of them.
//
// Only calls on paths below FAULT_ROOT count, so that call number k is the same in each run of the same command.
//   FAULT_COUNT=FILE     writes the number of calls at exit
//   FAULT_AT=K           the K-th call does FAULT_DO: kill, short (a write moves one byte), or an errno's name: EIO, ENOSPC, …
//                        ENOSPC and EROFS stay; the others come once
//   FAULT_NOEXCHANGE=1   the file system cannot exchange two folders
//   FAULT_RECORD=FOLDER  calls.tsv and data: what a simulation of power loss replays
// fault_arm() does the same for a process that was forked: it starts the count anew.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>  // RENAME_EXCHANGE
#include <cstdlib>
#include <cstring>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

struct Errno {
  const char* name;
  int number;
};
constexpr Errno kErrnos[] = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EROFS", EROFS},
                             {"EACCES", EACCES}, {"EMFILE", EMFILE}, {"EINTR", EINTR},   {"ENOMEM", ENOMEM}};

char root[4096];
char count_file[4096];
long fault_at = 0;
std::atomic<long> calls = 0;  // the program may call from several threads
char action[16];
bool no_exchange = false;
int record_log = -1, record_data = -1;
long record_bytes = 0;

long raw(long number, long a, long b = 0, long c = 0, long d = 0, long e = 0) { return ::syscall(number, a, b, c, d, e); }

int open_raw(const char* path, int flags, int mode = 0) {
  return static_cast<int>(raw(SYS_openat, AT_FDCWD, reinterpret_cast<long>(path), flags, mode));
}

void copy(char* to, size_t size, const char* from) { std::snprintf(to, size, "%s", from == nullptr ? "" : from); }

__attribute__((constructor)) void start() {
  copy(root, sizeof root, std::getenv("FAULT_ROOT"));
  copy(count_file, sizeof count_file, std::getenv("FAULT_COUNT"));
  copy(action, sizeof action, std::getenv("FAULT_DO"));
  if (const char* at = std::getenv("FAULT_AT")) fault_at = std::atol(at);
  no_exchange = std::getenv("FAULT_NOEXCHANGE") != nullptr;
  if (const char* folder = std::getenv("FAULT_RECORD")) {
    char path[4200];
    std::snprintf(path, sizeof path, "%s/calls.tsv", folder);
    record_log = open_raw(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    std::snprintf(path, sizeof path, "%s/data", folder);
    record_data = open_raw(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  }
}

__attribute__((destructor)) void finish() {
  if (count_file[0] == '\0') return;
  char text[32];
  const int size = std::snprintf(text, sizeof text, "%ld\n", calls.load());
  const int file = open_raw(count_file, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  raw(SYS_write, file, reinterpret_cast<long>(text), size);
  raw(SYS_close, file);
}

/// Absolute, without links: what does not begin with '/' is below the working directory.
void absolute(const char* path, char* into, size_t size) {
  if (path[0] == '/') return copy(into, size, path);
  char here[2048];
  if (raw(SYS_getcwd, reinterpret_cast<long>(here), sizeof here) < 0) here[0] = '\0';
  std::snprintf(into, size, "%s/%s", here, path);
}

bool below(const char* path) { return root[0] != '\0' && std::strncmp(path, root, std::strlen(root)) == 0; }

bool path_of(int file, char* into, size_t size) {
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const long length = raw(SYS_readlink, reinterpret_cast<long>(link), reinterpret_cast<long>(into), static_cast<long>(size) - 1);
  if (length < 0) return false;
  into[length] = '\0';
  return true;
}

enum class Fault { kNone, kFail, kShort };

/// Counts a call, and kills the process if its time has come. On kFail errno is set.
Fault count(const char* name) {
  const long call = ++calls;
  if (fault_at == 0 || action[0] == '\0') return Fault::kNone;
  const bool stays = std::strcmp(action, "ENOSPC") == 0 || std::strcmp(action, "EROFS") == 0;
  if (call != fault_at && !(stays && call > fault_at)) return Fault::kNone;
  if (std::strcmp(action, "kill") == 0) raw(SYS_kill, raw(SYS_getpid, 0), SIGKILL);
  const bool moves_bytes = std::strcmp(name, "write") == 0 || std::strcmp(name, "read") == 0;
  if (std::strcmp(action, "short") == 0) return moves_bytes ? Fault::kShort : Fault::kNone;
  // What a full or read-only disk still lets happen.
  const bool frees = std::strcmp(name, "unlink") == 0 || std::strcmp(name, "rmdir") == 0 || std::strcmp(name, "close") == 0;
  const bool reads =
      std::strcmp(name, "open for reading") == 0 || std::strcmp(name, "flock") == 0 || std::strcmp(name, "read") == 0;
  if (stays && (reads || (frees && std::strcmp(action, "ENOSPC") == 0) || std::strcmp(name, "close") == 0)) return Fault::kNone;
  for (const Errno& each : kErrnos) {
    if (std::strcmp(action, each.name) == 0) {
      errno = each.number;
      return Fault::kFail;
    }
  }
  return Fault::kNone;
}

void record(const char* name, const char* path, const char* other = "", long offset = 0, long size = 0) {
  if (record_log < 0) return;
  char line[9000];
  const int length = std::snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%ld\n", name, path, other, offset, size);
  raw(SYS_write, record_log, reinterpret_cast<long>(line), length);
}

int open_counted(const char* path, int flags, int mode) {
  char full[4096];
  absolute(path, full, sizeof full);
  if (!below(full)) return open_raw(path, flags, mode);
  if (count((flags & O_ACCMODE) == O_RDONLY ? "open for reading" : "open") == Fault::kFail) return -1;
  const int file = open_raw(path, flags, mode);
  if (file >= 0 && (flags & O_CREAT) != 0) record((flags & O_EXCL) != 0 ? "create" : "open", full);
  return file;
}

/// A call on one path.
template <class Call>
int on_path(const char* name, const char* path, const Call& call) {
  char full[4096];
  absolute(path, full, sizeof full);
  const bool counted = below(full);
  if (counted && count(name) == Fault::kFail) return -1;
  const auto result = static_cast<int>(call());
  if (counted && result == 0) record(name, full);
  return result;
}

template <class Call>
int on_file(const char* name, int file, const Call& call) {
  char path[4096];
  const bool counted = root[0] != '\0' && path_of(file, path, sizeof path) && below(path);
  if (counted && count(name) == Fault::kFail) {
    const int error = errno;
    if (std::strcmp(name, "close") == 0) (void)call();  // Linux closes whatever close() says
    errno = error;
    return -1;
  }
  const auto result = static_cast<int>(call());
  if (counted && result == 0) record(name, path);
  return result;
}

int rename_counted(const char* from, const char* to, unsigned flags) {
  if ((flags & RENAME_EXCHANGE) != 0 && no_exchange) {
    errno = EINVAL;
    return -1;
  }
  char first[4096], second[4096];
  absolute(from, first, sizeof first);
  absolute(to, second, sizeof second);
  const bool counted = below(first) || below(second);
  if (counted && count("rename") == Fault::kFail) return -1;
  const long result =
      raw(SYS_renameat2, AT_FDCWD, reinterpret_cast<long>(from), AT_FDCWD, reinterpret_cast<long>(to), static_cast<long>(flags));
  if (counted && result == 0) record(flags == 0 ? "rename" : "exchange", first, second);
  return static_cast<int>(result);
}

}  // namespace

extern "C" {

void fault_arm(const char* folder, long at, const char* what) {
  copy(root, sizeof root, folder);
  copy(action, sizeof action, what);
  fault_at = at;
  calls = 0;
}
long fault_calls() { return calls; }

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, int) : 0;
  va_end(rest);
  return open_counted(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, int) : 0;
  va_end(rest);
  return open_counted(path, flags, mode);
}
int close(int file) {
  return on_file("close", file, [&] { return raw(SYS_close, file); });
}
int fsync(int file) {
  return on_file("fsync", file, [&] { return raw(SYS_fsync, file); });
}
int fallocate(int file, int mode, off_t offset, off_t size) {
  return on_file("fallocate", file, [&] { return raw(SYS_fallocate, file, mode, offset, size); });
}
int ftruncate(int file, off_t size) noexcept {
  return on_file("ftruncate", file, [&] { return raw(SYS_ftruncate, file, size); });
}
int flock(int file, int operation) noexcept {  // NOLINT
  return on_file("flock", file, [&] { return raw(SYS_flock, file, operation); });
}
ssize_t write(int file, const void* from, size_t size) {
  char path[4096];
  const bool counted = root[0] != '\0' && path_of(file, path, sizeof path) && below(path);
  if (counted) {
    const Fault fault = count("write");
    if (fault == Fault::kFail) return -1;
    if (fault == Fault::kShort && size > 1) size = 1;
  }
  const long offset = counted ? raw(SYS_lseek, file, 0, SEEK_CUR) : 0;
  const long result = raw(SYS_write, file, reinterpret_cast<long>(from), static_cast<long>(size));
  if (counted && result > 0 && record_data >= 0) {
    raw(SYS_write, record_data, reinterpret_cast<long>(from), result);
    char place[32];
    std::snprintf(place, sizeof place, "%ld", record_bytes);
    record("write", path, place, offset, result);
    record_bytes += result;
  }
  return result;
}
int mkdir(const char* path, mode_t mode) noexcept {
  return on_path("mkdir", path, [&] { return raw(SYS_mkdir, reinterpret_cast<long>(path), mode); });
}
int rmdir(const char* path) noexcept {
  return on_path("rmdir", path, [&] { return raw(SYS_rmdir, reinterpret_cast<long>(path)); });
}
int unlink(const char* path) noexcept {
  return on_path("unlink", path, [&] { return raw(SYS_unlink, reinterpret_cast<long>(path)); });
}
int remove(const char* path) noexcept {
  return on_path("unlink", path, [&] {
    const long result = raw(SYS_unlink, reinterpret_cast<long>(path));
    return result != 0 && errno == EISDIR ? raw(SYS_rmdir, reinterpret_cast<long>(path)) : result;
  });
}
DIR* opendir(const char* path) {
  using Call = DIR* (*)(const char*);
  static const auto next = reinterpret_cast<Call>(::dlsym(RTLD_NEXT, "opendir"));
  char full[4096];
  absolute(path, full, sizeof full);
  if (below(full) && count("read") == Fault::kFail) return nullptr;
  return next(path);
}
dirent* readdir(DIR* stream) {
  using Call = dirent* (*)(DIR*);
  static const auto next = reinterpret_cast<Call>(::dlsym(RTLD_NEXT, "readdir"));
  char path[4096];
  if (root[0] != '\0' && path_of(::dirfd(stream), path, sizeof path) && below(path) && count("read") == Fault::kFail)
    return nullptr;
  return next(stream);
}
ssize_t pread_counted(int file, void* to, size_t size, off_t offset) {
  char path[4096];
  if (root[0] != '\0' && path_of(file, path, sizeof path) && below(path)) {
    const Fault fault = count("read");
    if (fault == Fault::kFail) return -1;
    if (fault == Fault::kShort && size > 1) size = 1;
  }
  return raw(SYS_pread64, file, reinterpret_cast<long>(to), static_cast<long>(size), offset);
}
ssize_t pread(int file, void* to, size_t size, off_t offset) { return pread_counted(file, to, size, offset); }
ssize_t pread64(int file, void* to, size_t size, off_t offset) { return pread_counted(file, to, size, offset); }
ssize_t pwrite(int file, const void* from, size_t size, off_t offset) {
  const auto call = [&] { return raw(SYS_pwrite64, file, reinterpret_cast<long>(from), static_cast<long>(size), offset); };
  char path[4096];
  if (root[0] != '\0' && path_of(file, path, sizeof path) && below(path)) {
    const Fault fault = count("write");
    if (fault == Fault::kFail) return -1;
    if (fault == Fault::kShort && size > 1) size = 1;
  }
  return call();
}
int rename(const char* from, const char* to) noexcept { return rename_counted(from, to, 0); }
int renameat2(int, const char* from, int, const char* to, unsigned flags) noexcept { return rename_counted(from, to, flags); }
}
