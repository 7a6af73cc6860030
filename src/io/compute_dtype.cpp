// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/compute_dtype.hpp"

#include "qlorapp/core/check.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/tensor_file.hpp"

namespace qlorapp {

std::string dtype_text(at::ScalarType dtype) { return std::string(format::torch_name(format_dtype_of(dtype))); }

ComputeDtype choose_compute_dtype(std::optional<at::ScalarType> requested, std::optional<format::Dtype> stored,
                                  at::DeviceType device, int64_t architecture) {
  const bool on_gpu = device == at::kCUDA;
  const at::ScalarType wanted = requested ? *requested : stored ? scalar_type_of(*stored, "config.json") : at::kFloat;
  const at::ScalarType usable = on_gpu ? usable_dtype(wanted, architecture) : wanted;
  if (usable != wanted) {
    return {usable,
            concat(dtype_text(usable), ": ", requested ? "bfloat16 is requested" : "the checkpoint is bfloat16", ", and sm_",
                   architecture, " has no bfloat16 arithmetic"),
            true};
  }
  if (requested) return {usable, concat(dtype_text(usable), ", as requested"), false};
  if (!stored) return {usable, concat(dtype_text(usable), ": config.json names no dtype"), false};
  if (!on_gpu && usable == at::kHalf) {
    return {at::kFloat,
            "float32: the checkpoint is float16, which a CPU computes in only with loss scaling; --bf16 halves the memory", true};
  }
  return {usable, concat(dtype_text(usable), ", the dtype of the checkpoint"), false};
}

}  // namespace qlorapp
