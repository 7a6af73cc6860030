// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/compute_dtype.hpp"

#include "core/check.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/io/device.hpp"

namespace qlorapp {

std::string dtype_text(at::ScalarType dtype) { return std::string(format::torch_name(format_dtype_of(dtype))); }

ComputeDtype choose_compute_dtype(std::optional<at::ScalarType> requested, std::optional<format::Dtype> stored,
                                  at::DeviceType device, int64_t architecture) {
  const bool on_gpu = device == at::kCUDA;
  const at::ScalarType wanted = requested ? *requested : stored ? scalar_type_of(*stored, "config.json") : at::kFloat;
  const at::ScalarType usable = on_gpu ? usable_dtype(wanted, architecture) : wanted;
  if (usable != wanted) {
    return {usable,
            message("{}: {}, and sm_{} has no bfloat16 arithmetic", dtype_text(usable),
                    requested ? "bfloat16 is requested" : "the checkpoint is bfloat16", architecture),
            true};
  }
  if (requested) return {usable, message("{}, as requested", dtype_text(usable)), false};
  if (!stored) return {usable, message("{}: config.json names no dtype", dtype_text(usable)), false};
  if (!on_gpu && usable == at::kHalf) {
    return {at::kFloat, "float32: the checkpoint is float16, which needs loss scaling on a CPU; --bf16 halves the memory", true};
  }
  return {usable, message("{}, the dtype of the checkpoint", dtype_text(usable)), false};
}

}  // namespace qlorapp
