// SPDX-License-Identifier: Apache-2.0
/// Command line options that train and plan share: the headings of fields in help, and the requested dtype.
#pragma once

#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "command_line.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp::cli {

/// Help's headings for the fields of TrainingArguments and LoraConfig.
void group_training_fields(CommandLine& line);

/// The dtype of --dtype, --bf16 and --fp16; unset if none is given. --bf16 false asks for float32.
/// @param named  --dtype. @throws ValueError if they differ.
[[nodiscard]] std::optional<at::ScalarType> requested_dtype(const CommandLine& line, const TrainingArguments& args,
                                                            std::optional<at::ScalarType> named);

/// args.bf16 and args.fp16 as the dtype that is computed in says. @throws ValueError if fp8 does not go with it.
void set_precision(TrainingArguments& args, at::ScalarType dtype);

/// The adapter's own config, whose values hold. Options of LoraConfig that are given must agree with it: with its values, or, for
/// targets, ranks and scalings, with what they mean for the layers of this model.
/// @throws ValueError naming the option and both values.
[[nodiscard]] LoraConfig config_of_adapter(const CommandLine& line, const LoraConfig& asked, const std::string& folder,
                                           const format::ModelConfig& model);

}  // namespace qlorapp::cli
