// SPDX-License-Identifier: Apache-2.0
/// NCCL as a backend of c10d.
#pragma once

#include <cstdint>

#include <c10/util/intrusive_ptr.h>

#include "dist/store_communicator.hpp"

namespace c10d {
class Backend;
}  // namespace c10d

namespace qlorapp {

/// Between the ranks that meet at `place`.  @throws ValueError in a build without NCCL.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> nccl_backend(const MeetingPlace& place, int64_t rank);

}  // namespace qlorapp
