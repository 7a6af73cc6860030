// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/evaluate.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "ops/device_memory.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/collate.hpp"

namespace qlorapp {
namespace {

/// (M) bool on the CPU: positions whose target is not the token with the largest logit. Logits of a few rows at a time.
at::Tensor missed_targets(const CausalLM& model, const at::Tensor& hidden, const at::Tensor& targets) {
  constexpr int64_t kChunk = 512;
  at::Tensor missed = at::zeros({targets.size(0)}, at::TensorOptions().dtype(at::kBool));
  const at::Tensor scored = targets.ge(0).nonzero().squeeze(1);
  for (const at::Tensor& rows : scored.split(kChunk)) {
    if (rows.numel() == 0) continue;
    const at::Tensor best = model.logits(hidden.index_select(0, rows)).argmax(-1);
    missed.index_put_({rows.cpu()}, best.ne(targets.index_select(0, rows)).cpu());
  }
  return missed;
}

/// What the rows of a batch add up to.
struct Score {
  double loss = 0;
  int64_t targets = 0, prompted_rows = 0, exact_matches = 0;

  Score& operator+=(const Score& other) {
    loss += other.loss;
    targets += other.targets;
    prompted_rows += other.prompted_rows;
    exact_matches += other.exact_matches;
    return *this;
  }
};

/// Counts rows with a prompt, and those without a miss.
void count_matches(const Batch& batch, const at::Tensor& missed, Score& score) {
  const at::Tensor targets = batch.targets.cpu();
  const auto* target = targets.const_data_ptr<int64_t>();
  const auto* miss = missed.const_data_ptr<bool>();
  for (size_t row = 0; row + 1 < batch.row_starts.size(); ++row) {
    const int64_t begin = batch.row_starts[row], end = batch.row_starts[row + 1];
    const bool has_targets = std::any_of(target + begin, target + end, [](int64_t t) { return t >= 0; });
    if (!has_targets || target[begin] >= 0) continue;  // all of it is the answer: there is no prompt to answer
    ++score.prompted_rows;
    if (std::none_of(miss + begin, miss + end, [](bool m) { return m; })) ++score.exact_matches;
  }
}

Score score_at_once(CausalLM& model, std::span<const Example> rows, bool exact_match) {
  const Batch batch = collate(rows).to(model.device());
  Score score;
  score.targets = batch.target_count;
  if (batch.target_count == 0 && !model.decoder().is_sharded()) return score;
  const at::Tensor hidden = model.hidden_states(batch, /*training=*/false, 0, 0), loss = model.loss_of(hidden, batch);
  if (batch.target_count == 0) return score;
  score.loss = loss.item<double>();
  if (exact_match) count_matches(batch, missed_targets(model, hidden, batch.targets), score);
  return score;
}

/// @param most  rows at a time; halved where memory runs out, for this call and later ones.
Score score_of(CausalLM& model, std::span<const Example> rows, bool exact_match, size_t& most) {
  Score score;
  for (size_t begin = 0; begin < rows.size();) {
    const std::span<const Example> some = rows.subspan(begin, std::min(most, rows.size() - begin));
    try {
      score += score_at_once(model, some, exact_match);
      begin += some.size();
      continue;
    } catch (const std::exception& error) {
      if (some.size() == 1 || !ops::is_out_of_memory(error) || model.decoder().is_sharded()) throw;
      most = (some.size() + 1) / 2;
      log_warning(
          message("[evaluate] out of memory with {} rows at once ({}). From here on batches are split into parts of at most {} "
                  "rows. The loss stays that of whole batches.",
                  some.size(), first_line(error), most));
    }
    ops::release_cached_memory(model.device());  // here: the exception may hold tensors
  }
  return score;
}

}  // namespace

EvalResult evaluate(CausalLM& model, const std::vector<Example>& rows, const EvalOptions& options) {
  QLORAPP_CHECK_VALUE(!rows.empty(), "[evaluate] the evaluation data hold no rows.");
  QLORAPP_CHECK_VALUE(options.batch_size >= 1, "[evaluate] the batch size must be at least 1; got {}.", options.batch_size);
  QLORAPP_CHECK_VALUE(!(options.exact_match && model.decoder().is_sharded()),
                      "[evaluate] exact_match is not computed with base_sharding: ranks would gather the head at different times. "
                      "Evaluate the saved adapter with qlorapp eval.");
  const at::NoGradGuard no_grad;
  EvalResult result;
  double over_rows = 0, over_tokens = 0;
  int64_t counted_rows = 0, left_out = 0;
  const auto step = static_cast<size_t>(options.batch_size);
  size_t most = step;
  const auto rank = static_cast<size_t>(options.ranks ? options.ranks->rank() : 0);
  const auto ranks = static_cast<size_t>(options.ranks ? options.ranks->size() : 1);
  // Of a sharded base each rank gathers blocks as often as the others.
  const size_t passes_end =
      model.decoder().is_sharded() ? (rows.size() + ranks * step - 1) / (ranks * step) * ranks * step : rows.size();
  for (size_t begin = rank * step; begin < passes_end; begin += ranks * step) {
    if (begin >= rows.size()) {
      const Batch filler = Batch::filler(rows.front().input_ids.front()).to(model.device());
      static_cast<void>(model.loss_of(model.hidden_states(filler, /*training=*/false, 0, 0), filler));
      continue;
    }
    const size_t end = std::min(rows.size(), begin + step);
    const Score score = score_of(model, std::span(rows).subspan(begin, end - begin), options.exact_match, most);
    result.prompted_rows += score.prompted_rows;
    result.exact_matches += score.exact_matches;
    const bool counts = !options.leave_out_nonfinite || std::isfinite(score.loss);
    if (!counts) ++left_out;
    if (counts && score.targets > 0) {
      over_tokens += score.loss;
      over_rows += score.loss / static_cast<double>(score.targets) * static_cast<double>(end - begin);
      counted_rows += static_cast<int64_t>(end - begin);
      result.target_tokens += score.targets;
    }
    if (options.after_each_batch) options.after_each_batch();
  }
  if (options.ranks != nullptr && ranks > 1) {
    const std::vector<int64_t> counts =
        sum_over(*options.ranks, {result.prompted_rows, result.exact_matches, result.target_tokens, counted_rows, left_out});
    result.prompted_rows = counts[0];
    result.exact_matches = counts[1];
    result.target_tokens = counts[2];
    counted_rows = counts[3];
    left_out = counts[4];
    const at::Tensor sums = at::tensor({over_rows, over_tokens}, at::kDouble).to(model.device());
    options.ranks->all_reduce(sums).wait();
    over_rows = sums[0].item<double>();
    over_tokens = sums[1].item<double>();
  }
  if (left_out > 0) {
    log_warning(message("[evaluate] {} batches have a loss that is not finite{}", left_out,
                        counted_rows > 0 ? "; they are left out of the mean." : ", which is all of them."));
    if (counted_rows == 0) {
      result.mean_of_batches = result.token_weighted = std::numeric_limits<double>::quiet_NaN();
      return result;
    }
  }
  QLORAPP_CHECK_VALUE(result.target_tokens > 0, "[evaluate] no row of the evaluation data has a token to predict.");
  result.mean_of_batches = over_rows / static_cast<double>(counted_rows);
  result.token_weighted = over_tokens / static_cast<double>(result.target_tokens);
  return result;
}

}  // namespace qlorapp
