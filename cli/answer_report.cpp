// SPDX-License-Identifier: Apache-2.0
#include "answer_report.hpp"

#include <unistd.h>

#include <limits>
#include <utility>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "generation_options.hpp"
#include "nn/decoder.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/core/log.hpp"
#include "stop_signals.hpp"
#include "train/comparison_svg.hpp"
#include "train/run_report.hpp"

namespace qlorapp::cli {
namespace {

/// Of the comparison, unless --eval_generate says another number.
constexpr int64_t kAnswersAtEnd = 8;

bool is_stopped() { return StopSignals::received() != 0; }

/// Warns, and gives the memory back that a failed computation may have taken.
void leave_out(const CausalLM& model, std::string_view what, const std::exception& error) {
  log_warning(message("[eval_generate] {}: {}", what, first_line(error)));
  if (ops::is_out_of_memory(error)) ops::release_cached_memory(model.device());
}

}  // namespace

void AnswerReport::add_to(TrainerCallbacks& callbacks, const TrainingArguments& args, bool resumes) {
  if (writes_) {
    callbacks.on_event = [this, folder = args.output_dir, resumes, told = std::move(callbacks.on_event)](
                             TrainerEvent event, const TrainState& state, TrainerControl& control) {
      if (event == TrainerEvent::kTrainBegin) begin(folder, resumes ? std::optional(state.global_step) : std::nullopt);
      if (told) told(event, state, control);
    };
  }
  callbacks.on_evaluate = [this, told = std::move(callbacks.on_evaluate)](const LogRecord& metrics, TrainerControl& control) {
    last_of(trainer_->state().global_step).eval_loss = metrics.number("eval_loss");
    if (told) told(metrics, control);
  };
  if (args.eval_generate.value_or(0) == 0) return;
  if (model_.decoder().is_sharded()) {
    log_info("eval_generate: no answers, as the base is divided over several processes (base_sharding)");
    return;
  }
  callbacks.measure = [this](LogRecord& metrics, const TrainState& state) { answer(metrics, state); };
}

void AnswerReport::begin(const std::string& folder, std::optional<int64_t> resumed_at) try {
  ::unlink(files::path_in(folder, kComparisonPicture).c_str());  // of another run
  file_.emplace(folder, resumed_at);
} catch (const std::exception& error) { leave_out(model_, "the answers are not written", error); }

AnswerOptions AnswerReport::options() const {
  AnswerOptions options{.max_new_tokens = trainer_->args().eval_max_new_tokens,
                        .eos_token_ids = model_.config().eos_token_ids,
                        .decode = {},
                        .max_rows = trainer_->args().per_device_eval_batch_size,  // the plan has room for an evaluation's batch
                        .stop_now = is_stopped};
  if (!tools_.has_tokenizer()) return options;
  GenerationOptions ends;
  ends.add_ends(model_, tools_, tools_.has_template());
  options.eos_token_ids = std::move(ends.generate.eos_token_ids);
  options.decode = [this](std::span<const TokenId> ids, bool skip_special_tokens) {
    return tools_.decode(ids, skip_special_tokens);
  };
  return options;
}

RunScore& AnswerReport::last_of(int64_t step) {
  if (std::exchange(last_step_, step) != step) last_ = {};
  return last_;
}

RunScore AnswerReport::known() const {
  const TrainState& state = trainer_->state();
  const bool is_best = trainer_->args().load_best_model_at_end && state.best_global_step;
  return last_step_ == (is_best ? *state.best_global_step : state.global_step) ? last_ : RunScore();
}

std::vector<HeldOutQuestion> AnswerReport::questions(int64_t count, const AnswerOptions& options) const {
  return choose_questions(eval_rows_, count, options.eos_token_ids, model_.config().max_position_embeddings);
}

void AnswerReport::answer(LogRecord& metrics, const TrainState& state) try {
  AnswerOptions how = options();
  if (!is_alone_) how.stop_now = {};
  const std::vector<HeldOutQuestion> asked = questions(*trainer_->args().eval_generate, how);
  if (asked.empty()) {
    if (!std::exchange(has_said_, true))
      log_info("eval_generate: no answers, as the evaluation rows have no prompt: they are trained as a whole");
    return;
  }
  const std::optional<Answers> answers = answer_rows(model_, asked, how);
  if (!answers) return;  // the run ends at this evaluation
  const auto share = [&](int64_t count) { return static_cast<double>(count) / static_cast<double>(asked.size()); };
  metrics.set("eval_exact_match", share(answers->exact_matches()));
  metrics.set("eval_stopped", share(answers->stopped()));
  RunScore& last = last_of(state.global_step);
  last.exact_matches = answers->exact_matches(), last.stopped = answers->stopped();
  if (file_) file_->add(state.global_step, answers->lines(state.global_step));
} catch (const std::exception& error) {
  leave_out(model_, message("the answers of step {} are left out", state.global_step), error);
  for (const char* name : {"eval_exact_match", "eval_stopped"})  // for metric_for_best_model: not the best
    if (!metrics.contains(name)) metrics.set(name, std::numeric_limits<double>::quiet_NaN());
}

std::vector<std::string> AnswerReport::compare() try {
  if (model_.decoder().is_sharded()) {
    log_info("base against adapter: not compared, as the base is divided over several processes (base_sharding)");
    return {};
  }
  const TrainingArguments& args = trainer_->args();
  CompareOptions how{.eval = {.batch_size = args.per_device_eval_batch_size,
                              .leave_out_nonfinite = args.logging_nan_inf_filter,
                              .after_each_batch = {}},
                     .questions = {},
                     .answers = options(),
                     .neutral_ids = {},
                     .known = known()};
  how.questions = questions(args.eval_generate.value_or(kAnswersAtEnd), how.answers);
  if (tools_.has_tokenizer()) how.neutral_ids = tools_.encode(neutral_text(), /*add_special_tokens=*/true).ids;
  if (model_.adapters().changed_base()) {
    log_info(message("base against adapter: init_lora_weights took a part out of the base, so the adapter has no base to compare"));
  }
  if (!trainer_->eval_data().empty()) {
    log_info(
        message("comparing base and adapter: {} held-out rows, {} answers", trainer_->eval_data().size(), how.questions.size()));
  }
  const std::optional<Comparison> found = compare_with_base(model_, trainer_->eval_data(), how);
  if (!found || found->is_empty()) {
    log_info(found ? "base against adapter: nothing to compare on, as there are neither held-out rows nor a tokenizer"
                   : "base against adapter: not compared, as a signal came");
    return {};
  }
  if (writes_) {
    write_comparison_svg(args.output_dir, *found);
    add_to_run_report(args.output_dir, *found);
  }
  std::vector<std::string> lines = found->table();
  if (found->eval_rows == 0) lines.emplace_back("  no held-out rows: --val_size N or --eval_data FILE shows what was learned");
  return lines;
} catch (const std::exception& error) {
  leave_out(model_, "base against adapter: not compared", error);
  return {};
}

}  // namespace qlorapp::cli
