// SPDX-License-Identifier: Apache-2.0
/// NCCL as a backend of c10d.
#pragma once

#include <chrono>
#include <cstdint>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace qlorapp {

/// @throws ValueError in a build without NCCL.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                             int64_t size, std::chrono::seconds timeout);

}  // namespace qlorapp
