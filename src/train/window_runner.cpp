// SPDX-License-Identifier: Apache-2.0
#include "train/window_runner.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "ops/device_memory.hpp"
#include "ops/launch_graph.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/collate.hpp"
#include "qlorapp/train/batch_probe.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/step.hpp"
#include "train/diagnosis.hpp"

namespace qlorapp {
namespace {

/// What a step has reached, over all attempts at it.
struct Progress {
  int64_t substeps_told = 0;  ///< Micro-batches whose end was reported; a retried window does not report it again.
  bool update_told = false;
  int64_t meetings = 0;  ///< Rendezvous between micro-batches so far; equal on all ranks, also after a retry.
  enum class At : uint8_t {
    kWindow,
    kExchange,
    kUpdate,
    kEnd
  } at = At::kWindow;  ///< Of this attempt. Behind the exchange of several ranks' gradients, and behind the update, it cannot be repeated.
  bool in_callback = false;  ///< What fails there is the caller's, and not taken again.

  void tell(const auto& what, const auto&... arguments) {
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
      progress.at = Progress::At::kExchange;
      done(block);
    };
    const LossSum loss = graphs != nullptr ? graphs->forward_backward(batch, grad_scale, key, noted)
                                           : model.forward_backward(batch, grad_scale, key, noted);
    if (observer.poll) progress.tell(observer.poll);
    return loss;
  }
};

/// For all attempts at one window. Both must outlive the hooks.
StepHooks hooks_of(const WindowRunner::Observer& observer, Progress& progress) {
  return {.before_exchange = [&] { progress.at = Progress::At::kExchange; },
          .before_optimizer_step =
              [&] {
                if (!progress.update_told) progress.tell(observer.event, TrainerEvent::kPreOptimizerStep);
                progress.update_told = true;
                progress.at = Progress::At::kUpdate;
              },
          .after_optimizer_step =
              [&] {
                progress.at = Progress::At::kEnd;
                progress.tell(observer.event, TrainerEvent::kOptimizerStep);
              },
          .sum_counts = sum_counts_once()};
}

}  // namespace

WindowRunner::WindowRunner(CausalLM& model, TrainState& state, const TrainingArguments& args, const std::vector<Example>& rows,
                           bool evaluates)
    : model_(model), state_(state), args_(args), rows_(rows), evaluates_(evaluates) {
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
  if (graphs_) graphs_->clear();
}

int64_t WindowRunner::tokens_of(const std::vector<int64_t>& rows) const {
  int64_t tokens = 0;
  for (const int64_t row : rows) tokens += row_tokens(row);
  return tokens;
}

std::vector<std::vector<std::vector<int64_t>>> WindowRunner::parts_of(const Window& window) const {
  const auto rank = static_cast<size_t>(state_.ranks ? state_.ranks->rank() : 0);
  const auto ranks = static_cast<size_t>(state_.ranks ? state_.ranks->size() : 1);
  std::vector<std::vector<std::vector<int64_t>>> result;
  for (size_t batch = rank; batch < window.rows.size(); batch += ranks) {
    const std::vector<int64_t>& rows = window.rows[batch];
    auto& parts = result.emplace_back(1);
    for (const int64_t row : rows) {
      const bool full = most_tokens_ > 0 && !parts.back().empty() && tokens_of(parts.back()) + row_tokens(row) > most_tokens_;
      if (full) parts.emplace_back();
      parts.back().push_back(row);
    }
  }
  return result;
}

std::vector<Batch> WindowRunner::batches_of(const Window& window) const {
  std::vector<Batch> batches;
  for (const auto& parts : parts_of(window)) {
    int64_t first_token = 0;
    for (const std::vector<int64_t>& rows : parts) {
      batches.push_back(collate(rows_, rows).to(model_.device()));
      batches.back().first_token = first_token;
      first_token += batches.back().token_count();
    }
  }
  // Of a sharded base each rank gathers blocks as often as the others.
  const size_t ranks = model_.decoder().is_sharded() ? static_cast<size_t>(state_.ranks->size()) : 1;
  while (ranks > 1 && batches.size() * ranks < window.rows.size())
    batches.push_back(Batch::filler(rows_.front().input_ids.front()).to(model_.device()));
  return batches;
}

void WindowRunner::run_worst_case() {
  if (rows_.empty()) return;
  std::vector<int64_t> rows(rows_.size());
  std::iota(rows.begin(), rows.end(), int64_t{0});
  const size_t batch = std::min(rows.size(), static_cast<size_t>(args_.per_device_train_batch_size));
  std::partial_sort(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(batch), rows.end(),
                    [&](int64_t a, int64_t b) { return row_tokens(a) > row_tokens(b); });
  rows.resize(batch);
  const Window window{state_.cursor.epoch, state_.cursor.batch, 1, {rows}};
  for (bool again = false;; again = true) {
    try {
      for (const Batch& part : batches_of(window)) probe_micro_batch(model_, part);
      break;
    } catch (const std::exception& error) {
      if (!ops::is_out_of_memory(error)) throw;
      refuse_if_sharded(window, error);
      make_room(window, error, again);
    }
  }
  log_info(
      message("ran the largest micro-batch of the data: {} rows with {} tokens", static_cast<int64_t>(batch), tokens_of(rows)));
}

StepReport WindowRunner::run(const Window& window, const Observer& observer) {
  const uint32_t before = state_.micro_step;
  const auto abandon = [&] {
    // The state is as it was before: a checkpoint of it continues with the same bits, and so does the window if it is taken
    // again, as train_step clears the gradients first and dropout masks are a function of position.
    state_.micro_step = before;
    state_.scaler.abandon_step();
  };
  Progress progress;
  const int64_t shared = window.batches / (state_.ranks ? state_.ranks->size() : 1);
  const StepHooks hooks = hooks_of(observer, progress);
  bool update_failed = false;
  for (bool again = false;; again = true) {
    progress.at = Progress::At::kWindow;
    try {
      const std::vector<Batch> batches = batches_of(window);
      Observed model{model_, graphs_.get(), observer, shared, progress};
      return train_step(model, state_, std::span<const Batch>(batches), hooks);
    } catch (const std::exception& error) {
      abandon();
      if (progress.in_callback || progress.at == Progress::At::kEnd || !ops::is_out_of_memory(error)) throw;
      const bool has_ranks = state_.ranks && state_.ranks->size() > 1;
      if (has_ranks && progress.at != Progress::At::kWindow) throw;  // the others went on
      if (progress.at != Progress::At::kUpdate) {
        refuse_if_sharded(window, error);
        make_room(window, error, again);
        continue;
      }
      // An update takes its memory before it writes anything, so it has changed nothing, and smaller parts would not help it.
      if (update_failed) throw;
      update_failed = true;
      log_warning(
          message("[trainer] out of memory in the update of step {} ({}). Cached memory is released, and the step is retried once.",
                  state_.global_step + 1, first_line(error)));
      ops::release_cached_memory(model_.device());
    } catch (...) {
      abandon();
      throw;
    }
  }
}

std::string WindowRunner::diagnosis(const Window& window) {
  if (model_.decoder().is_sharded()) return "The first layer that is not finite is not looked for with base_sharding.";
  const std::vector<Batch> batches = batches_of(window);
  return first_non_finite(model_, batches, state_.seed, state_.micro_step);
}

int64_t WindowRunner::longest_of(const Window& window) const {
  int64_t longest = 0;
  for (const auto& rows : window.rows) {
    for (const int64_t row : rows) longest = std::max(longest, row_tokens(row));
  }
  return longest;
}

/// Smaller parts would gather blocks more often than the other ranks do.
void WindowRunner::refuse_if_sharded(const Window& window, const std::exception& error) const {
  if (!model_.decoder().is_sharded()) return;
  throw OutOfMemoryError(
      message("[trainer] out of memory in step {}. With base_sharding a micro-batch is not split into parts. {} {}",
              state_.global_step + 1, advice_when_full(model_, args_, longest_of(window)), first_line(error)));
}

void WindowRunner::make_room(const Window& window, const std::exception& error, bool again) {
  if (graphs_) graphs_->clear();
  ops::release_cached_memory(model_.device());
  int64_t fullest = 0, longest = 0;
  for (const auto& parts : parts_of(window)) {
    for (const std::vector<int64_t>& rows : parts) {
      fullest = std::max(fullest, tokens_of(rows));
      for (const int64_t row : rows) longest = std::max(longest, row_tokens(row));
    }
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
