// SPDX-License-Identifier: Apache-2.0
#include "files/faulty_calls.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string_view>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

FaultyCalls faults;
std::atomic<int> calls_left{0};  // several threads may read
std::atomic<bool> active{false};

bool fails(std::string_view call) {
  if (!active || call != faults.call) return false;
  const int left = calls_left--;
  if (left > 0 || (faults.once && left < 0)) return false;
  errno = faults.error;
  return true;
}

size_t limited(size_t count) { return active && faults.most != 0 ? std::min(count, faults.most) : count; }

}  // namespace

WithFaultyCalls::WithFaultyCalls(const FaultyCalls& wanted) {
  faults = wanted;
  calls_left = wanted.after;
  active = true;
}
WithFaultyCalls::~WithFaultyCalls() { active = false; }

extern "C" {
ssize_t pread(int file, void* into, size_t count, off_t offset) {
  return fails("pread") ? -1 : static_cast<ssize_t>(::syscall(SYS_pread64, file, into, limited(count), offset));
}
ssize_t write(int file, const void* from, size_t count) {
  return fails("write") ? -1 : static_cast<ssize_t>(::syscall(SYS_write, file, from, limited(count)));
}
int fsync(int file) { return fails("fsync") ? -1 : static_cast<int>(::syscall(SYS_fsync, file)); }
int rename(const char* from, const char* to) noexcept {
  return fails("rename") ? -1 : static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
}
