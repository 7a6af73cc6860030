// SPDX-License-Identifier: Apache-2.0
/// A number that tells frozen bases apart, so that a run is never resumed on another one.
#pragma once

#include <cstdint>

#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// 64 bits over the bytes of all frozen weights and their shapes. Reads every weight once; on a GPU it synchronizes.
/// Not cryptographic: it finds mistakes, not attacks.
[[nodiscard]] uint64_t base_fingerprint(const CausalLM& model);

}  // namespace qlorapp
