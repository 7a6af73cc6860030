// SPDX-License-Identifier: Apache-2.0
// Between ATen's tensors and the kernels of cuda/: device, stream, element type, errors. Included by src/ops/cuda only.
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "cuda/gemm_4bit.hpp"
#include "cuda/types.hpp"
#include "ops/device_memory.hpp"

namespace qlorapp::ops::gpu {

/// What a kernel computes on. The other shared checks have passed.
inline cuda::Float float_type(std::string_view op, const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return cuda::Float::kFloat32;
    case at::kHalf:
      return cuda::Float::kFloat16;
    case at::kBFloat16:
      return cuda::Float::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "[", op, "] on a GPU the dtype must be float32, float16 or bfloat16; got ", x.scalar_type(),
                       ". Convert it, or compute on the CPU.");
  }
}

/// For arguments whose device the shared checks leave open.
inline void check_device(std::string_view op, std::string_view name, const at::Tensor& x, const at::Tensor& like) {
  TORCH_CHECK_VALUE(x.device() == like.device(), "[", op, "] ", name, " must be on ", like.device(), "; got ", x.device(),
                    ". Move it.");
}

/// Makes the device of x current for a scope, and names its stream.
class Launch {
 public:
  explicit Launch(const at::Tensor& x) : guard_(x.device()) { prepare_device_memory(); }
  [[nodiscard]] cuda::Stream stream() const { return at::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
};

/// What the kernels are compiled for that run on the current device: cuda/gemm_4bit.hpp. Asked once a device.
inline int code_architecture() {
  static std::array<std::atomic<int>, 64> known{};
  const auto device = static_cast<size_t>(c10::cuda::current_device());
  if (device >= known.size()) return cuda::code_architecture();
  int arch = known[device].load(std::memory_order_relaxed);
  if (arch == 0) known[device].store(arch = cuda::code_architecture(), std::memory_order_relaxed);
  return arch;
}

/// One number on the device, or null.
inline const float* device_number(const std::optional<at::Tensor>& number) {
  return number.has_value() && number->defined() ? number->const_data_ptr<float>() : nullptr;
}

}  // namespace qlorapp::ops::gpu
