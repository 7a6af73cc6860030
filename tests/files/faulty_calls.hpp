// SPDX-License-Identifier: Apache-2.0
/// Makes the operating system misbehave: this executable's own pread, write, fsync and rename stand before libc's.
#pragma once

#include <cstddef>

struct FaultyCalls {
  const char* call = "";  ///< Which one fails: "pread", "write", "fsync", "rename".
  int error = 0;          ///< errno of the failing call.
  int after = 0;          ///< Calls that succeed before it fails.
  bool once = false;      ///< Fails one time only (EINTR) instead of from then on.
  size_t most = 0;        ///< If not 0, pread and write move at most this many bytes a call.
};

/// In force while an object of it lives.
class WithFaultyCalls {
 public:
  explicit WithFaultyCalls(const FaultyCalls& faults);
  ~WithFaultyCalls();
  WithFaultyCalls(const WithFaultyCalls&) = delete;
  WithFaultyCalls& operator=(const WithFaultyCalls&) = delete;
};
