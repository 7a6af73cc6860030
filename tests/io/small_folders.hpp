// SPDX-License-Identifier: Apache-2.0
/// A model folder that tests only read, and what is in a folder.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <string>

#include "format/expect_error.hpp"
#include "io/tensor_file.hpp"
#include "memory/small_checkpoint.hpp"
#include "qlorapp/io/load_model.hpp"

namespace tiny {

/// A bfloat16 model of three layers with a head of its own, written once.
inline const TemporaryFolder& base_folder() {
  static const TemporaryFolder folder;
  static const bool written = (write_small_checkpoint(folder, "bfloat16", at::kBFloat16, /*tied=*/false), true);
  (void)written;
  return folder;
}

inline std::map<std::string, at::Tensor> folder_tensors(const std::string& folder) {
  const qlorapp::NamedTensors tensors = qlorapp::read_tensors(folder + "/model.safetensors");
  return {tensors.begin(), tensors.end()};
}

inline qlorapp::CausalLM folder_model(const std::string& folder, bool in_4bit) {
  qlorapp::LoadOptions options;
  options.load_in_4bit = in_4bit;
  options.compute_dtype = at::kBFloat16;
  return qlorapp::load_model(folder, options);
}

inline at::Tensor folder_logits(qlorapp::CausalLM& model) {
  const at::NoGradGuard no_grad;
  const qlorapp::Batch batch = qlorapp::Batch::of_equal_rows(at::arange(16, at::kLong).mul_(249).view({2, 8}));
  return model.logits(model.hidden_states(batch, /*training=*/false, 0, 0));
}

}  // namespace tiny
