// SPDX-License-Identifier: Apache-2.0
/// The linear layers of a block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qlorapp {

/// Slots of format::parameters() (Role::kLinear).
enum class Projection : uint8_t { kQ, kK, kV, kO, kGate, kUp, kDown };
constexpr size_t index(Projection projection) { return static_cast<size_t>(projection); }

}  // namespace qlorapp
