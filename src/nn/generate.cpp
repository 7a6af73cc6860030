// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/check.hpp"
#include "nn/generation_cache.hpp"

namespace qlorapp {
namespace {

at::Tensor ids_on(at::Device device, const std::vector<int64_t>& ids) {
  return at::tensor(ids, at::TensorOptions().dtype(at::kLong)).to(device);
}

void check(const CausalLM& model, const std::vector<std::vector<int64_t>>& prompts, const GenerateOptions& options) {
  QLORAPP_CHECK_VALUE(options.max_new_tokens >= 1, "[generate] max_new_tokens must be at least 1; got {}.", options.max_new_tokens);
  options.sampling.validate();
  QLORAPP_CHECK_VALUE(!prompts.empty(), "[generate] there must be a prompt; got none.");
  const int64_t vocabulary = model.config().vocab_size;
  for (const std::vector<int64_t>& prompt : prompts) {
    QLORAPP_CHECK_VALUE(!prompt.empty(), "[generate] the prompt must hold at least one token; got none.");
    for (size_t i = 0; i < prompt.size(); ++i) {
      QLORAPP_CHECK_VALUE(prompt[i] >= 0 && prompt[i] < vocabulary,
                          "[generate] token {} of the prompt must be in [0, {}); got {}. Does the tokenizer belong to the model?",
                          i, vocabulary, prompt[i]);
    }
  }
}

/// The eos tokens that the model has at all, where they are not allowed yet.
std::vector<int64_t> blocked_now(const CausalLM& model, const GenerateOptions& options, int64_t position) {
  std::vector<int64_t> blocked;
  if (position >= options.min_new_tokens) return blocked;
  for (const int64_t id : options.eos_token_ids) {
    if (id >= 0 && id < model.config().vocab_size) blocked.push_back(id);
  }
  return blocked;
}

/// Whether the cache's keys turned by other angles than those of rows of this length do (longrope). They are then formed again, as transformers
/// does for Phi-3.
bool outgrows(const format::ModelConfig& config, int64_t before, int64_t now) {
  return std::any_of(config.ropes.begin(), config.ropes.end(), [&](const format::RopeSettings& rope) {
    return rope.type == format::RopeSettings::Type::kLongRope && is_long_for(rope, before) != is_long_for(rope, now);
  });
}

}  // namespace

std::vector<std::vector<int64_t>> generate(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                           const GenerateOptions& options) {
  check(model, prompts, options);
  const at::NoGradGuard no_grad;
  const bool penalized = options.sampling.repetition_penalty != 1.0;
  std::vector<std::vector<int64_t>> generated(prompts.size());
  std::vector<std::set<int64_t>> seen(prompts.size());
  std::vector<int64_t> rows(prompts.size()), tokens, counts;
  std::iota(rows.begin(), rows.end(), int64_t{0});
  int64_t longest = 0;
  for (size_t row = 0; row < prompts.size(); ++row) {
    tokens.insert(tokens.end(), prompts[row].begin(), prompts[row].end());
    counts.push_back(std::ssize(prompts[row]));
    longest = std::max(longest, counts.back());
    if (penalized) seen[row].insert(prompts[row].begin(), prompts[row].end());
  }
  GenerationCache cache = make_cache(model, std::ssize(prompts), longest + options.max_new_tokens);
  cache.adapters_are_constant = true;
  int64_t before = 0;  // positions of the longest row
  for (int64_t position = 0; position < options.max_new_tokens && !rows.empty(); ++position) {
    const auto length = [&](int64_t row) {
      return std::ssize(prompts[static_cast<size_t>(row)]) + std::ssize(generated[static_cast<size_t>(row)]);
    };
    const int64_t now = length(*std::max_element(rows.begin(), rows.end(), [&](auto a, auto b) { return length(a) < length(b); }));
    if (position > 0 && outgrows(model.config(), before, now)) {
      tokens.clear();
      for (size_t i = 0; i < rows.size(); ++i) {
        const auto row = static_cast<size_t>(rows[i]);
        tokens.insert(tokens.end(), prompts[row].begin(), prompts[row].end());
        tokens.insert(tokens.end(), generated[row].begin(), generated[row].end());
        counts[i] = length(rows[i]);
        cache.lengths[row] = 0;
      }
    }
    before = now;
    const at::Tensor logits = model.logits(forward_cached(model, ids_on(model.device(), tokens), rows, counts, cache));
    std::vector<at::Tensor> seen_ids;
    for (const int64_t row : rows) {
      const auto& ids = seen[static_cast<size_t>(row)];
      if (penalized) seen_ids.push_back(ids_on(model.device(), {ids.begin(), ids.end()}));
    }
    const at::Tensor scores = warped_logits(logits, seen_ids, blocked_now(model, options, position), options.sampling);
    const std::vector<int64_t> chosen = choose_tokens(scores, rows, position, options.sampling);
    std::vector<int64_t> going_on;
    tokens.clear();
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t token = chosen[i];
      generated[static_cast<size_t>(rows[i])].push_back(token);
      if (penalized) seen[static_cast<size_t>(rows[i])].insert(token);
      const bool ended =
          std::find(options.eos_token_ids.begin(), options.eos_token_ids.end(), token) != options.eos_token_ids.end();
      const bool wanted = !options.on_token || options.on_token(rows[i], token);
      if (ended || !wanted) continue;
      going_on.push_back(rows[i]);
      tokens.push_back(token);
    }
    rows = std::move(going_on);
    counts.assign(rows.size(), 1);
  }
  return generated;
}

std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options) {
  return std::move(generate(model, std::vector<std::vector<int64_t>>{prompt}, options).front());
}

}  // namespace qlorapp
