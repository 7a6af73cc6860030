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

/// How a communicator ends.
enum class Leaving : uint8_t {
  kNever,   ///< Sends nothing: the store belongs to the program.
  kTells,   ///< Tells the others that this rank makes no more exchanges.
  kAsLast,  ///< Also waits for the others, because the store ends with this process.
};

/// @param device  that tensors are on.  @param place  for texts and failures; null: texts are exchanged as tensors.
[[nodiscard]] std::shared_ptr<Communicator> communicator_over(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                                                              std::unique_ptr<MeetingPlace> place, Leaving leaving);

}  // namespace qlorapp
