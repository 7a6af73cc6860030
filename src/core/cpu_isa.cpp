// SPDX-License-Identifier: Apache-2.0
#include "core/cpu_isa.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>

namespace qlorapp {
namespace {

constexpr std::array<CpuIsa, 4> kAll{CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16};

CpuIsa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512bf16") ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kScalar;
}

CpuIsa initial() {
  const char* wanted = std::getenv("QLORAPP_CPU_ISA");
  for (const CpuIsa isa : kAll)
    if (wanted != nullptr && to_string(isa) == wanted) return std::min(isa, best_cpu_isa());
  return best_cpu_isa();
}

std::atomic<CpuIsa>& current() {
  static std::atomic<CpuIsa> isa{initial()};
  return isa;
}

}  // namespace

CpuIsa best_cpu_isa() {
  static const CpuIsa best = detect();
  return best;
}

CpuIsa cpu_isa() { return current().load(std::memory_order_relaxed); }

void set_cpu_isa(CpuIsa isa) { current().store(std::min(isa, best_cpu_isa()), std::memory_order_relaxed); }

std::string_view to_string(CpuIsa isa) {
  constexpr std::array<std::string_view, kAll.size()> kNames{"scalar", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<size_t>(isa)];
}

}  // namespace qlorapp
