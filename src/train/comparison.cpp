// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/comparison.hpp"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "nn/decoder.hpp"

namespace qlorapp {
namespace {

/// Ends an evaluation between two batches.
struct Stopped {};

/// The base alone, while it lives.
class AdaptersOff {
 public:
  explicit AdaptersOff(CausalLM& model) : model_(model) { model_.adapters().enable(false); }
  ~AdaptersOff() { model_.adapters().enable(true); }
  AdaptersOff(const AdaptersOff&) = delete;
  AdaptersOff& operator=(const AdaptersOff&) = delete;

 private:
  CausalLM& model_;
};

/// @param found  what is known of it.
RunScore score(CausalLM& model, const std::vector<Example>& eval_rows, const CompareOptions& options, RunScore found) {
  const auto& stop_now = options.answers.stop_now;
  if (!eval_rows.empty() && !found.eval_loss) {
    EvalOptions eval = options.eval;
    eval.after_each_batch = [&] {
      if (stop_now && stop_now()) throw Stopped();
      if (options.eval.after_each_batch) options.eval.after_each_batch();
    };
    found.eval_loss = evaluate(model, eval_rows, eval).mean_of_batches;
  }
  if (options.neutral_ids.size() >= 2 && !found.neutral_loss) {
    const size_t most = std::min(options.neutral_ids.size(), static_cast<size_t>(model.config().max_position_embeddings));
    Example neutral;
    neutral.input_ids.assign(options.neutral_ids.begin(), options.neutral_ids.begin() + static_cast<std::ptrdiff_t>(most));
    neutral.labels = neutral.input_ids;
    found.neutral_loss = evaluate(model, {neutral}, {.batch_size = 1, .after_each_batch = {}}).token_weighted;
  }
  if (!options.questions.empty() && !(found.exact_matches && found.stopped)) {
    const std::optional<Answers> answers = answer_rows(model, options.questions, options.answers);
    if (!answers) throw Stopped();
    found.exact_matches = answers->exact_matches();
    found.stopped = answers->stopped();
  }
  return found;
}

format::Json json_of(const RunScore& score, int64_t answers) {
  const auto or_null = [](const std::optional<double>& value) { return value ? format::Json(*value) : format::Json(nullptr); };
  const auto share = [&](const std::optional<int64_t>& count) {
    return count && answers > 0 ? format::Json(static_cast<double>(*count) / static_cast<double>(answers)) : format::Json(nullptr);
  };
  return {{"eval_loss", or_null(score.eval_loss)},
          {"exact_match", share(score.exact_matches)},
          {"stopped", share(score.stopped)},
          {"neutral_loss", or_null(score.neutral_loss)}};
}

std::string loss_text(const std::optional<double>& loss) { return loss ? message("{:.4g}", *loss) : "-"; }
std::string count_text(const std::optional<int64_t>& count) { return count ? message("{}", *count) : "-"; }

}  // namespace

std::string_view neutral_text() {
  return "The library opens at nine in the morning. A narrow stair leads from the street to the reading room, where long tables "
         "stand under tall windows. Most people come for the newspapers, a few for the old maps in the cellar. On rainy days the "
         "room fills early, and those who arrive late sit on the steps with a book on their knees. The librarian knows many of "
         "them by name. She keeps a list of the books that were asked for and could not be found, and every spring she sends it "
         "to the council with a short letter. Usually some of them are bought. In the evening the lamps are put out one after "
         "the other, the door is locked, and the cat of the house comes out to look for mice.";
}

format::Json Comparison::to_json() const {
  return {{"eval_rows", eval_rows},
          {"answers", answers},
          {"neutral_tokens", neutral_tokens},
          {"base", base ? json_of(*base, answers) : format::Json(nullptr)},
          {"adapter", json_of(adapter, answers)}};
}

std::vector<std::string> Comparison::table() const {
  const RunScore none;
  const RunScore& before = base ? *base : none;
  std::vector<std::array<std::string, 3>> rows{{"base against adapter", "base", "adapter"}};
  if (eval_rows > 0)
    rows.push_back({message("  held-out loss ({} rows)", eval_rows), loss_text(before.eval_loss), loss_text(adapter.eval_loss)});
  if (answers > 0) {
    rows.push_back(
        {message("  exact match (of {} answers)", answers), count_text(before.exact_matches), count_text(adapter.exact_matches)});
    rows.push_back({message("  answers that stop (of {})", answers), count_text(before.stopped), count_text(adapter.stopped)});
  }
  if (neutral_tokens > 0) {
    rows.push_back({message("  loss on a neutral text ({} tokens)", neutral_tokens), loss_text(before.neutral_loss),
                    loss_text(adapter.neutral_loss)});
  }
  std::array<size_t, 3> widths{};
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::vector<std::string> lines;
  for (const auto& row : rows)
    lines.push_back(message("{:<{}}  {:>{}}  {:>{}}", row[0], widths[0], row[1], widths[1], row[2], widths[2]));
  return lines;
}

std::optional<Comparison> compare_with_base(CausalLM& model, const std::vector<Example>& eval_rows, const CompareOptions& options) {
  QLORAPP_CHECK_VALUE(!model.adapters().empty(), "[compare_with_base] the model must have adapters; it has none.");
  QLORAPP_CHECK_VALUE(!model.decoder().is_sharded(),
                      "[compare_with_base] the base must be whole; it is divided by base_sharding. Load it on one process.");
  Comparison result;
  result.eval_rows = std::ssize(eval_rows);
  result.answers = std::ssize(options.questions);
  try {
    result.adapter = score(model, eval_rows, options, options.known);
    if (!model.adapters().changed_base()) {
      const AdaptersOff base_alone(model);
      result.base = score(model, eval_rows, options, {});
    }
  } catch (const Stopped&) { return std::nullopt; }
  if (result.adapter.neutral_loss)
    result.neutral_tokens = std::min(std::ssize(options.neutral_ids), model.config().max_position_embeddings);
  return result;
}

}  // namespace qlorapp
