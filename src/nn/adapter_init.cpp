// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/adapter_init.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <string_view>

namespace qlorapp {

void initialize_lora_a(const at::Tensor& a, bool gaussian, uint64_t seed) {
  if (a.is_meta()) return;
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  at::Tensor values = at::empty(a.sizes(), at::TensorOptions().dtype(at::kFloat));
  if (gaussian) {
    values.normal_(0.0, 1.0 / static_cast<double>(a.size(0)), generator);
  } else {
    const double bound = 1.0 / std::sqrt(static_cast<double>(a.size(1)));
    values.uniform_(-bound, bound, generator);
  }
  a.detach().copy_(values);
}

void initialize_adapters(AdapterArena& arena, const LoraConfig& config, uint64_t seed) {
  for (int64_t i = 0; i < arena.size(); ++i) {
    const std::string& name = arena.entries()[static_cast<size_t>(i)].name;
    if (name.find(".lora_A.") == std::string::npos) continue;
    uint64_t stream = seed;  // FNV-1a over the name, from the seed
    for (const char c : name) stream = (stream ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    initialize_lora_a(arena.parameter(i), config.gaussian_init(), stream);
  }
}

}  // namespace qlorapp
