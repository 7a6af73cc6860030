// SPDX-License-Identifier: Apache-2.0
#include "run_report.hpp"

#include <array>
#include <cstdio>
#include <utility>

#include "core/check.hpp"

namespace qlorapp::cli {
namespace {

std::string loss_of(Trainer& trainer) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "loss %.4g", trainer.last_step().number("loss"));
  return text.data();
}

}  // namespace

TrainerCallbacks RunReport::callbacks() {
  TrainerCallbacks result;
  result.on_log = [this](const LogRecord& record, TrainerControl&) { line(record.to_line()); };
  result.on_event = [this](TrainerEvent event, const TrainState& state, TrainerControl& control) {
    if (event == TrainerEvent::kStepEnd) after_step(state, control);
  };
  result.on_save = [this](const std::string& folder, TrainerControl&) { line("saved " + folder); };
  return result;
}

void RunReport::after_step(const TrainState& state, TrainerControl& control) {
  const bool is_first = std::exchange(is_first_, false);
  const bool is_last = state.global_step == state.schedule.training_steps || control.should_training_stop;
  // With "epoch" the end of an epoch logs the last step by itself.
  const bool is_shown = (is_first && strategy_ != "no") || (is_last && strategy_ == "steps");
  bar_.update(state.global_step, state.schedule.training_steps, [&] { return loss_of(*trainer_); });  // a line draws it again
  if (is_shown && !control.should_log) line(trainer_->last_step().to_line());
}

}  // namespace qlorapp::cli
