// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/device.hpp"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "core/check.hpp"
#include "ops/device_memory.hpp"
#include "ops/operator.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {
namespace {

bool has_kernels() {
  const auto op = c10::Dispatcher::singleton().findSchema({"qlorapp::linear_4bit", ""});
  return op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

}  // namespace

bool has_gpu() { return has_kernels() && at::hasCUDA() && at::getNumGPUs() > 0; }

at::Device parse_device(const std::string& text) {
  if (text == "cpu") return at::kCPU;
  if (text == "auto") return has_gpu() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  int64_t index = -1;
  if (text == "cuda") index = 0;
  if (text.starts_with("cuda:") && text.size() > 5 && text.size() < 9 &&
      text.find_first_not_of("0123456789", 5) == std::string::npos) {
    index = std::stoll(text.substr(5));
  }
  QLORAPP_CHECK_VALUE(index >= 0, "[device] must be auto, cpu, cuda or cuda:<number>; got '{}'.", text);
  QLORAPP_CHECK_VALUE(has_kernels(),
                      "[device] this build has no kernels for a GPU; got '{}'. Build with nvcc and a CUDA build of torch "
                      "(-DQLORAPP_CUDA=ON names the missing part), or give --device cpu.",
                      text);
  const int64_t count = at::hasCUDA() ? static_cast<int64_t>(at::getNumGPUs()) : 0;
  QLORAPP_CHECK_VALUE(index < count, "[device] this machine has {}; got '{}'. Give --device cpu, or the number of an existing GPU.",
                      count == 1 ? "1 GPU" : message("{} GPUs", count), text);
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

int64_t gpu_architecture(at::Device device) {
  if (!device.is_cuda() || !has_kernels()) return 0;
  static const auto op = ops::Operator<int64_t(int64_t)>("qlorapp::gpu_architecture");
  return op.call(device.has_index() ? device.index() : -1);
}

std::string gpu_name(at::Device device) {
  if (!device.is_cuda() || !has_kernels()) return {};
  static const auto op = ops::Operator<std::string(int64_t)>("qlorapp::gpu_name");
  return op.call(device.has_index() ? device.index() : -1);
}

Bytes memory_for(at::Device device) { return ops::usable_memory(device); }

at::ScalarType usable_dtype(at::ScalarType wanted, int64_t architecture) {
  return wanted == at::kBFloat16 && architecture > 0 && architecture < 80 ? at::kHalf : wanted;
}

at::ScalarType dtype_on(int64_t architecture, at::ScalarType wanted) {
  const at::ScalarType usable = usable_dtype(wanted, architecture);
  if (usable != wanted) {
    log_warning_once(
        message("this GPU (sm_{}) has no bfloat16 arithmetic: computing in float16, with loss scaling in training", architecture));
  }
  return usable;
}

}  // namespace qlorapp
