// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "qlorapp/core/check.hpp"

namespace qlorapp {

std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options) {
  QLORAPP_CHECK_VALUE(!prompt.empty(), "[generate] the prompt must hold at least one token; got none.");
  QLORAPP_CHECK_VALUE(options.max_new_tokens >= 1, "[generate] max_new_tokens must be at least 1; got ", options.max_new_tokens,
                      ".");
  const int64_t vocabulary = model.config().vocab_size;
  for (size_t i = 0; i < prompt.size(); ++i) {
    QLORAPP_CHECK_VALUE(prompt[i] >= 0 && prompt[i] < vocabulary, "[generate] token ", i, " of the prompt must be in [0, ",
                        vocabulary, "); got ", prompt[i], ". Does the tokenizer belong to the model?");
  }
  const at::NoGradGuard no_grad;
  const auto options_of = at::TensorOptions().dtype(at::kLong);
  std::vector<KeyValueCache> cache = model.make_cache(static_cast<int64_t>(prompt.size()) + options.max_new_tokens);
  at::Tensor tokens = at::tensor(prompt, options_of).to(model.device());
  std::vector<int64_t> generated;
  while (static_cast<int64_t>(generated.size()) < options.max_new_tokens) {
    const at::Tensor logits = model.logits(model.forward_cached(tokens, cache));
    const auto next = logits.argmax(-1).item<int64_t>();
    generated.push_back(next);
    const bool ended = std::find(options.eos_token_ids.begin(), options.eos_token_ids.end(), next) != options.eos_token_ids.end();
    if (ended || (options.on_token && !options.on_token(next))) break;
    tokens = at::full({1}, next, options_of.device(model.device()));
  }
  return generated;
}

}  // namespace qlorapp
