// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAContextLight.h>
#include <torch/library.h>

#include <string>

#include "ops/device_memory.hpp"

namespace qlorapp::ops {
namespace {

const cudaDeviceProp* properties_of(int64_t device) {
  prepare_device_memory();  // a run asks for its GPU before it allocates there
  return device < 0 ? at::cuda::getCurrentDeviceProperties() : at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
}

int64_t gpu_architecture(int64_t device) { return properties_of(device)->major * 10 + properties_of(device)->minor; }

std::string gpu_name(int64_t device) { return properties_of(device)->name; }

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CompositeExplicitAutograd, m) {
  m.impl("gpu_architecture", gpu_architecture);
  m.impl("gpu_name", gpu_name);
}

}  // namespace qlorapp::ops
