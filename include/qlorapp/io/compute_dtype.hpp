// SPDX-License-Identifier: Apache-2.0
/// The dtype that activations, norms, embeddings and head are computed in. One rule for training, evaluation, generation and
/// plans.
#pragma once

#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "qlorapp/format/dtype.hpp"

namespace qlorapp {

struct ComputeDtype {
  at::ScalarType dtype;
  std::string reason;  ///< "bfloat16, the dtype of the checkpoint": what follows "computes in".
  /// The dtype is not the one that was asked for or that is stored.
  bool is_substitute = false;
};

/// The requested dtype, else the checkpoint's, else float32. Two are replaced: bfloat16 by float16 on a GPU older than sm_80
/// (usable_dtype), also where it was requested; and a checkpoint's float16 by float32 on a CPU, which has no float16 arithmetic
/// and would need loss scaling: float32 holds the same values. A requested float16 stays.
/// @param stored        ModelConfig::dtype.
/// @param architecture  of a GPU, 75 for a T4; of no meaning on a CPU.
[[nodiscard]] ComputeDtype choose_compute_dtype(std::optional<at::ScalarType> requested, std::optional<format::Dtype> stored,
                                                at::DeviceType device, int64_t architecture);

/// "float32", "bfloat16", "float16": as config.json and options spell it. @throws ValueError for another one.
[[nodiscard]] std::string dtype_text(at::ScalarType dtype);

}  // namespace qlorapp
