// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/memory_settings.hpp"

#include <array>

#include "core/check.hpp"
#include "core/nearest_name.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 3> kWorkspaceNames{"layer", "stack", "projection"};

}  // namespace

std::string_view to_string(WeightWorkspace workspace) { return kWorkspaceNames[static_cast<size_t>(workspace)]; }

WeightWorkspace parse_weight_workspace(std::string_view text) {
  for (size_t i = 0; i < kWorkspaceNames.size(); ++i) {
    if (kWorkspaceNames[i] == text) return static_cast<WeightWorkspace>(i);
  }
  throw ValueError(message("[weight_workspace] must be one of {}; got '{}'.{}", joined(kWorkspaceNames), text,
                           did_you_mean(text, kWorkspaceNames)));
}

int64_t MemorySettings::loss_chunk_rows_on(bool gpu, int64_t vocabulary) const {
  if (loss_chunk_rows > 0) return loss_chunk_rows;
  if (!gpu) return 512;
  int64_t rows = 2048;
  for (int64_t room = 150'000; room < vocabulary && rows > 256; room *= 2) rows /= 2;
  return rows;
}

void MemorySettings::validate() const {
  QLORAPP_CHECK_VALUE(loss_chunk_rows >= 0, "[memory] loss_chunk_rows must be a number of rows, or 0 for the device's own; got {}.",
                      loss_chunk_rows);
  QLORAPP_CHECK_VALUE(
      mlp_tile_rows >= 0 && mlp_tile_rows % kTileStep == 0,
      "[memory] mlp_tile_rows must be a multiple of {}, or 0 for all rows at once; got {}. A GPU works best with 1024 or more.",
      kTileStep, mlp_tile_rows);
}

}  // namespace qlorapp
