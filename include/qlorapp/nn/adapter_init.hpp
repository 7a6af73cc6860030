// SPDX-License-Identifier: Apache-2.0
/// Initial values of adapters, by PEFT's rules and a seed of their own.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/adapter_arena.hpp"
#include "qlorapp/nn/lora_config.hpp"

namespace qlorapp {

/// Fills A (r, in): uniform in ±1/sqrt(in), which is kaiming_uniform with a = sqrt(5), or normal with standard deviation 1/r.
/// The values depend on the seed alone, not on the device. B is left at zero by its owner.
void initialize_lora_a(const at::Tensor& a, bool gaussian, uint64_t seed);

/// All A of an arena; entry i draws from its own stream, so that one more target does not change the others.
void initialize_adapters(AdapterArena& arena, const LoraConfig& config, uint64_t seed);

}  // namespace qlorapp
