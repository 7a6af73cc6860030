// SPDX-License-Identifier: Apache-2.0
/// How many parameters a model with adapters has, from its configs alone: no weight is read or made.
#pragma once

#include <cstdint>
#include <string>

#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

struct ParameterCount {
  int64_t trainable = 0;  ///< Elements of all A (r, in) and B (out, r), magnitudes and modules_to_save.
  int64_t all = 0;        ///< Those and the base's, a tied head counted once and a four-bit weight by its elements.
};

/// @throws ValueError as LoraConfig::validate, or if the config matches no layer.
[[nodiscard]] ParameterCount count_parameters(const format::ModelConfig& model, const LoraConfig& lora);

/// PEFT's line: "trainable params: 3,407,872 || all params: 1,239,222,272 || trainable%: 0.2750".
[[nodiscard]] std::string trainable_parameters_line(const ParameterCount& count);

}  // namespace qlorapp
