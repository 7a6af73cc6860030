// SPDX-License-Identifier: Apache-2.0
/// Which parameters of a model an adapter's matrices change, however its file spells their names.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "adapter_tensors.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {

struct AdapterModules {
  struct Found {
    format::Parameter parameter;
    std::string module;  ///< As the adapter's file has it.
    const AdaptedModule* lora;
  };
  std::map<std::string, Found> found;  ///< By the parameter's name.
  std::vector<std::string> others;     ///< Modules of the file that are none of the model's text.
};

/// @throws FormatError for matrices of another shape than their parameter's.
[[nodiscard]] AdapterModules adapter_modules(const format::ModelConfig& config, const AdapterFile& adapter,
                                             const AdapterTensors& tensors);

/// Whether a saved tensor is the table beside whose adapter PEFT saves it, with the base's values. @param model  its folder; without weights: no.
[[nodiscard]] bool is_table_of_base(const std::string& model, const AdapterFile& adapter, const AdapterTensors& tensors,
                                    const std::string& name);

}  // namespace qlorapp
