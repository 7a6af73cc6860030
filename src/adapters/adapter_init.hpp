// SPDX-License-Identifier: Apache-2.0
/// Initial values of adapters, by PEFT's rules and a seed of their own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "adapters/adapter_set.hpp"
#include "qlorapp/adapters/lora_config.hpp"

namespace qlorapp {

/// Fills A (r, in): uniform in ±1/sqrt(in), which is kaiming_uniform with a = sqrt(5), or normal with standard deviation 1/r.
/// The values depend on the seed alone, not on the device. B is left at zero by its owner.
void initialize_lora_a(const at::Tensor& a, bool gaussian, uint64_t seed);

/// Fills A and B of one module by config.init(), where that needs nothing but random numbers.
/// @param module  its name: each draws from its own stream, so that one more target does not change the others.
void initialize_adapter(const LoraAdapter& adapter, const LoraConfig& config, const std::string& module, uint64_t seed);

/// Fills A and B by config.init() where that decomposes the weight: PiSSA, OLoRA, LoftQ.
/// @param base    frozen, four-bit or dense.
/// @param weight  the same before it was quantized, float32 (out, in) on any device; undefined if it is not known: then PiSSA
/// and OLoRA
///                decompose the quantized one, and LoftQ, which needs both, is refused.
/// @returns what remains of the base, in the form and dtype of `base`; with one round of LoftQ the base itself.
/// Source: Meng et al. 2024, arXiv:2404.02948 (PiSSA; A = √(S/s)·Vᵀ, B = U·√(S/s)); Büyükakyüz 2024, arXiv:2406.01775 (OLoRA);
/// Li et al. 2023, arXiv:2310.08659, algorithm 1 (LoftQ).
[[nodiscard]] FrozenWeight initialize_adapter_from_weight(const LoraAdapter& adapter, const LoraConfig& config,
                                                          const std::string& module, const FrozenWeight& base,
                                                          const at::Tensor& weight, uint64_t seed);

}  // namespace qlorapp
