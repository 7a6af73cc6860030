// SPDX-License-Identifier: Apache-2.0
/// System calls that a signal interrupts are made again.
#pragma once

#include <cerrno>

namespace qlorapp::files {

/// @param call  returns below 0 and sets errno when it fails, as system calls do.
template <class Call>
auto retrying(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace qlorapp::files
