// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/evaluate.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "qlorapp/core/check.hpp"
#include "qlorapp/data/collate.hpp"

namespace qlorapp {

EvalLoss evaluate_loss(CausalLM& model, const std::vector<Example>& rows, int64_t batch_size,
                       const std::function<void()>& between_batches) {
  QLORAPP_CHECK_VALUE(!rows.empty(), "[evaluate] the evaluation data hold no rows.");
  EvalLoss result;
  double over_rows = 0, over_tokens = 0;
  int64_t counted_rows = 0;
  for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(batch_size)) {
    const size_t end = std::min(rows.size(), begin + static_cast<size_t>(batch_size));
    const LossSum sum = model.evaluate(collate(std::span(rows).subspan(begin, end - begin)).to(model.device()));
    if (sum.targets > 0) {
      const auto loss = sum.loss.item<double>();
      over_tokens += loss;
      over_rows += loss / static_cast<double>(sum.targets) * static_cast<double>(end - begin);
      counted_rows += static_cast<int64_t>(end - begin);
      result.target_tokens += sum.targets;
    }
    if (between_batches) between_batches();
  }
  QLORAPP_CHECK_VALUE(result.target_tokens > 0, "[evaluate] no row of the evaluation data has a token to predict.");
  result.mean_of_batches = over_rows / static_cast<double>(counted_rows);
  result.token_weighted = over_tokens / static_cast<double>(result.target_tokens);
  return result;
}

}  // namespace qlorapp
