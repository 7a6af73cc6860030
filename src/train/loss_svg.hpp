// SPDX-License-Identifier: Apache-2.0
/// loss.svg: the losses of a run over its steps (docs/formats/run_report.md).
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "qlorapp/json/json.hpp"

namespace qlorapp {

/// Training loss, evaluation loss, and the learning rate behind them in gray, on a scale of its own. Of more than 1,000 training losses, means of
/// neighbors are drawn. Values that are not finite leave gaps.
/// @param history  a list of entries as in trainer_state.json's log_history; others than `loss`, `eval_loss` and `learning_rate` are ignored.
/// @returns a complete SVG document.  @throws FormatError if it is no list of objects.
[[nodiscard]] std::string loss_svg(const format::Json& history);

/// Writes the file into a folder, whole or not at all. @throws IoError, FormatError
void write_loss_svg(const std::string& folder, const format::Json& history);

}  // namespace qlorapp
