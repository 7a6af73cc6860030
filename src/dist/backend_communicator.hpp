// SPDX-License-Identifier: Apache-2.0
/// A backend of c10d (NCCL, Gloo, MPI, a user's own) as a Communicator.
#pragma once

#include <cstdint>
#include <memory>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "dist/store_communicator.hpp"
#include "qlorapp/dist/communicator.hpp"

namespace qlorapp {

/// What the end of a communicator says to the others.
enum class Leaving : uint8_t {
  kNever,   ///< Nothing: the store is somebody else's.
  kTells,   ///< That this rank makes no more exchanges.
  kAsLast,  ///< The same, and waits for theirs, because the store ends with this process.
};

/// @param device  that tensors are on.  @param place  for texts and failures; null: texts are exchanged as tensors.
[[nodiscard]] std::shared_ptr<Communicator> communicator_over(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                                                              std::unique_ptr<MeetingPlace> place, Leaving leaving);

}  // namespace qlorapp
