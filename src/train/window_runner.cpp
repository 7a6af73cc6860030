// SPDX-License-Identifier: Apache-2.0
#include "train/window_runner.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <string_view>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "ops/device_memory.hpp"
#include "ops/launch_graph.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/train/batch_probe.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "train/diagnosis.hpp"

namespace qlorapp {
namespace {

/// The progress of a window's passes, over all attempts.
struct Progress {
  int64_t substeps_told = 0;  ///< Micro-batches whose end was reported; a retried window does not report it again.
  int64_t meetings = 0;       ///< Rendezvous between micro-batches so far; equal on all ranks, also after a retry.
  bool in_exchange = false;   ///< Of this attempt. Behind it, gradients of several ranks cannot be formed again.
  bool in_callback = false;   ///< What fails there is the caller's, and not taken again.

  void tell(const auto& what, const auto&... arguments) {
    if (!what) return;
    in_callback = true;
    what(arguments...);
    in_callback = false;
  }
};

/// The model as train_step sees it, which reports what happens between its micro-batches.
struct Observed {
  CausalLM& model;
  GraphedSteps* graphs;  ///< Null: micro-steps are launched.
  const WindowRunner::Observer& observer;
  int64_t shared;  ///< Micro-batches that every rank has. Sums may begin in the last of them, and then all ranks go on.
  Progress& progress;
  int64_t begun = 0;

  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& done) {
    if (batch.first_token == 0 && !batch.is_filler) {
      if (begun > progress.substeps_told) {
        ++progress.substeps_told;
        progress.tell(observer.event, TrainerEvent::kSubstepEnd);
      }
      if (observer.meet && begun > progress.meetings && begun < shared) {
        ++progress.meetings;
        progress.tell(observer.meet);
      }
      ++begun;
    }
    const BlockDone noted = !done ? done : [&](int64_t block) {
      progress.in_exchange = true;
      done(block);
    };
    const LossSum loss = graphs != nullptr ? graphs->forward_backward(batch, grad_scale, key, noted)
                                           : model.forward_backward(batch, grad_scale, key, noted);
    progress.tell(observer.poll);
    return loss;
  }
};

int64_t longest_row(std::span<const Batch> window) {
  int64_t longest = 0;
  for (const Batch& batch : window) {
    for (size_t row = 1; row < batch.row_starts.size(); ++row)
      longest = std::max(longest, batch.row_starts[row] - batch.row_starts[row - 1]);
  }
  return longest;
}

/// Adds a micro-batch in parts of as many rows as `most` tokens hold; a longer row is a part of its own.
void add_parts(const Batch& batch, int64_t most, at::Device device, std::vector<Batch>& parts) {
  const std::vector<int64_t>& starts = batch.row_starts;
  for (int64_t first = 0, last = 0; first < batch.row_count(); first = last) {
    const auto tokens = [&](int64_t end) { return starts[static_cast<size_t>(end)] - starts[static_cast<size_t>(first)]; };
    last = most > 0 ? first + 1 : batch.row_count();
    while (last < batch.row_count() && tokens(last + 1) <= most) ++last;
    parts.push_back(batch.rows(first, last).to(device));
  }
}

}  // namespace

WindowRunner::WindowRunner(CausalLM& model, TrainState& state, const TrainingArguments& args, bool evaluates)
    : model_(model), state_(state), args_(args), evaluates_(evaluates) {
  const std::string_view obstacle = obstacle_to_graphs(model.decoder().residency());
  if (args.cuda_graphs && !ops::has_launch_graphs(model.device())) {
    log_warning_once("[trainer] cuda_graphs has no effect: it records steps on a GPU.");
  } else if (args.cuda_graphs && !obstacle.empty()) {
    log_warning_once(message("[trainer] cuda_graphs has no effect with {}.", obstacle));
  } else if (args.cuda_graphs) {
    graphs_ = std::make_unique<GraphedSteps>(model);
  }
}

void WindowRunner::clear_graphs() {
  if (!graphs_) return;
  log_info(message("cuda_graphs: {} micro-steps of this run ran as one graph each", graphs_->replayed()));
  graphs_->clear();
}

std::vector<Batch> WindowRunner::parts_of(std::span<const Batch> window, int64_t batches) const {
  std::vector<Batch> parts;
  for (const Batch& batch : window) add_parts(batch, most_tokens_, model_.device(), parts);
  // Of a sharded base each rank gathers blocks as often as the others.
  const int64_t ranks = model_.decoder().is_sharded() ? state_.ranks->size() : 1;
  while (ranks > 1 && std::ssize(parts) * ranks < batches) parts.push_back(Batch::filler(0).to(model_.device()));
  return parts;
}

void WindowRunner::run_worst_case(const Batch& largest) {
  const std::span<const Batch> window(&largest, 1);
  for (bool again = false;; again = true) {
    try {
      for (const Batch& part : parts_of(window, 1)) probe_micro_batch(model_, part);
      break;
    } catch (const std::exception& error) {
      if (!ops::is_out_of_memory(error)) throw;
      release_memory();
      refuse_if_sharded(window, error);
      make_room(window, error, again);
    }
  }
  log_info(message("ran the largest micro-batch of the data: {} rows with {} tokens", largest.row_count(), largest.token_count()));
}

void WindowRunner::abandon(uint32_t micro_step) {
  // window_gradients() clears the gradients first, and dropout masks are a function of position.
  state_.micro_step = micro_step;
  state_.scaler.abandon_step();
}

StepReport WindowRunner::run(const MakeWindow& window, int64_t batches, const Observer& observer) {
  const uint32_t before = state_.micro_step;
  const WindowGradients found = gradients(window, batches, observer);
  try {
    return update(found, state_.schedule.learning_rate(state_.base_learning_rate, state_.optimizer.step_count()), observer);
  } catch (...) {
    abandon(before);
    throw;
  }
}

WindowGradients WindowRunner::gradients(const MakeWindow& window, int64_t batches, const Observer& observer) {
  const uint32_t before = state_.micro_step;
  const int64_t ranks = state_.ranks ? state_.ranks->size() : 1;
  Progress progress;
  const StepHooks hooks{.before_exchange = [&] { progress.in_exchange = true; }, .sum_counts = sum_counts_once()};
  for (bool again = false;; again = true) {
    progress.in_exchange = false;
    try {
      const std::vector<Batch> parts = parts_of(window(), batches);
      Observed model{model_, graphs_.get(), observer, batches / ranks, progress};
      WindowGradients found = window_gradients(model, state_, std::span<const Batch>(parts), hooks);
      if (ranks > 1 && model_.settings().token_statistics()) sum_statistics(found.token_statistics, (batches + ranks - 1) / ranks);
      return found;
    } catch (const std::exception& error) {
      abandon(before);
      if (progress.in_callback || !ops::is_out_of_memory(error)) throw;
      if (ranks > 1 && progress.in_exchange) throw;  // the others went on
      release_memory();                              // forming the window again allocates
      const std::vector<Batch> taken = window();
      refuse_if_sharded(taken, error);
      make_room(taken, error, again);
    } catch (...) {
      abandon(before);
      throw;
    }
  }
}

void WindowRunner::sum_statistics(at::Tensor& table, int64_t rows) const {
  const at::Tensor all = at::zeros({rows, 3}, at::TensorOptions().dtype(at::kFloat).device(model_.device()));
  if (table.defined()) all.narrow(0, 0, table.size(0)).copy_(table);
  state_.ranks->all_reduce(all).wait();
  table = all;
}

StepReport WindowRunner::update(const WindowGradients& gradients, double rate, const Observer& observer) {
  bool is_told = false, is_made = false, in_callback = false;
  const auto tell = [&](TrainerEvent event) {
    in_callback = true;
    if (observer.event) observer.event(event);
    in_callback = false;
  };
  const StepHooks hooks{.before_optimizer_step =
                            [&] {
                              if (!is_told) tell(TrainerEvent::kPreOptimizerStep);
                              is_told = true;
                            },
                        .after_optimizer_step =
                            [&] {
                              is_made = true;
                              tell(TrainerEvent::kOptimizerStep);
                            }};
  for (bool again = false;; again = true) {
    try {
      return apply_gradients(state_, gradients, rate, hooks);
    } catch (const std::exception& error) {
      // An update takes its memory before it writes anything, so it has changed nothing. Other ranks would not make theirs again.
      const bool has_ranks = state_.ranks && state_.ranks->size() > 1;
      if (again || is_made || in_callback || has_ranks || !ops::is_out_of_memory(error)) throw;
      state_.scaler.abandon_step();
      log_warning(
          message("[trainer] out of memory in the update of step {} ({}). Cached memory is released, and the step is retried once.",
                  state_.global_step + 1, first_line(error)));
      ops::release_cached_memory(model_.device());
    }
  }
}

std::string WindowRunner::diagnosis(std::span<const Batch> window) {
  if (model_.decoder().is_sharded()) return "The first layer that is not finite is not looked for with base_sharding.";
  return first_non_finite(model_, parts_of(window, std::ssize(window)), state_.seed, state_.micro_step);
}

/// Smaller parts would gather blocks more often than the other ranks do.
void WindowRunner::refuse_if_sharded(std::span<const Batch> window, const std::exception& error) const {
  if (!model_.decoder().is_sharded()) return;
  throw OutOfMemoryError(
      message("[trainer] out of memory in step {}. With base_sharding a micro-batch is not split into parts. {} {}",
              state_.global_step + 1, advice_when_full(model_, args_, longest_row(window)), first_line(error)));
}

void WindowRunner::release_memory() {
  if (graphs_) graphs_->clear();
  ops::release_cached_memory(model_.device());
}

void WindowRunner::make_room(std::span<const Batch> window, const std::exception& error, bool again) {
  const int64_t longest = longest_row(window);
  int64_t fullest = 0;
  for (const Batch& batch : window) {
    std::vector<Batch> parts;
    add_parts(batch, most_tokens_, at::kCPU, parts);
    for (const Batch& part : parts) fullest = std::max(fullest, part.token_count());
  }
  const int64_t fewer = std::max(longest, (fullest + 1) / 2);
  if (fewer < fullest) {
    log_warning(
        message("[trainer] out of memory in step {} with {} tokens at once ({}). From here on micro-batches are split into parts "
                "of at most {} tokens. Effective batch, token weights and dropout masks stay the same.",
                state_.global_step + 1, fullest, first_line(error), fewer));
    most_tokens_ = fewer;
    TrainingArguments parts = args_;
    parts.per_device_train_batch_size = std::max<int64_t>(1, fewer / longest);
    log_info(plan_line(model_, parts, longest, evaluates_));
    return;
  }
  if (!again) return;  // one row at a time already: once more, as something else may have held the memory
  throw OutOfMemoryError(message("[trainer] out of memory in step {} with one row of {} tokens. {} {}", state_.global_step + 1,
                                 longest, advice_when_full(model_, args_, longest), first_line(error)));
}

}  // namespace qlorapp
