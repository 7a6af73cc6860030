// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAContextLight.h>
#include <torch/library.h>

namespace qlorapp::ops {
namespace {

int64_t gpu_architecture(int64_t device) {
  const cudaDeviceProp* const properties =
      device < 0 ? at::cuda::getCurrentDeviceProperties() : at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  return properties->major * 10 + properties->minor;
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CompositeExplicitAutograd, m) { m.impl("gpu_architecture", gpu_architecture); }

}  // namespace qlorapp::ops
