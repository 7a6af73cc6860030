// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/cpu_isa.hpp"

namespace tests {

/// Runs with at most the given instruction set, and gives back what was chosen before.
class WithIsa {
 public:
  explicit WithIsa(qlorapp::CpuIsa isa) : before_(qlorapp::cpu_isa()) { qlorapp::set_cpu_isa(isa); }
  ~WithIsa() { qlorapp::set_cpu_isa(before_); }
  WithIsa(const WithIsa&) = delete;
  WithIsa& operator=(const WithIsa&) = delete;

 private:
  qlorapp::CpuIsa before_;
};

}  // namespace tests
