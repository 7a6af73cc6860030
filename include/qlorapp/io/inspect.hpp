// SPDX-License-Identifier: Apache-2.0
/// The kind of a folder, the programs that load it, and its damage.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace qlorapp {

struct Inspection {
  std::string kind;  ///< "checkpoint", "adapter", "four-bit model", "model" or "output folder of a run".
  std::vector<std::pair<std::string, std::string>> facts;  ///< In order: ("base model", "meta-llama/…").
  std::vector<std::string> loads_in;                       ///< Programs and calls that load it as it is.
  std::vector<std::string> damage;                         ///< One line for each thing that is wrong.
  bool is_verified = false;  ///< All weights were compared with the checksums of a manifest. Without one only some damage is found.
};

/// Reads every byte: a checkpoint is compared with its manifest, and so are the weights of an output that has one. Its other files may have
/// been edited: those that were are named in `facts`. In an adapter and a model, sizes and shapes are compared with what the
/// config asks for, and all numbers must be finite. An interrupted save of an adapter is completed. In an output folder it looks at each checkpoint and at the adapter.
/// @throws ValueError if it is no folder that this library knows; IoError if it cannot be read.
[[nodiscard]] Inspection inspect(const std::string& folder);

}  // namespace qlorapp
