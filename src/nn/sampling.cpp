// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/sampling.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "core/philox.hpp"
#include "nn/host_values.hpp"
#include "nn/top_p.hpp"
#include "ops/memory_tape.hpp"
#include "ops/sampling.hpp"

namespace qlorapp {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

/// In [0, 1), 53 bits.
double uniform(uint64_t seed, int64_t position, int64_t row) {
  const auto index = static_cast<uint64_t>(row);
  const auto bits =
      philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(position), 0x9E7E'0001U},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t wide = (uint64_t{bits[0]} << 32) | bits[1];
  return static_cast<double>(wide >> 11) * 0x1.0p-53;
}

/// at::where, which has no Meta kernel in C++: a plan's result has a shape alone.
at::Tensor chosen(const at::Tensor& condition, const at::Tensor& yes, const at::Tensor& no) {
  return yes.is_meta() ? at::empty_like(yes) : at::where(condition, yes, no);
}

void keep_top_k(at::Tensor& scores, int64_t k) {
  const at::Tensor least = std::get<0>(scores.topk(std::min(k, scores.size(-1)))).narrow(-1, std::min(k, scores.size(-1)) - 1, 1);
  scores.masked_fill_(scores < least, kNever);
}

/// @param as_torch  of equal scores those leave that torch.sort has first.
void keep_top_p(at::Tensor& scores, double p, bool as_torch) {
  if (!as_torch) {
    const at::Tensor probabilities = scores.softmax(-1);
    if (scores.is_meta()) return;
    const int64_t words = scores.size(-1);
    auto* const own = scores.mutable_data_ptr<float>();
    const auto* const of_all = probabilities.const_data_ptr<float>();
    at::parallel_for(0, scores.numel() / words, 1, [&](int64_t begin, int64_t end) {
      TopP top;
      for (int64_t row = begin; row < end; ++row) {
        const auto first = static_cast<size_t>(row * words), count = static_cast<size_t>(words);
        top.keep({own + first, count}, {of_all + first, count}, p);
      }
    });
    return;
  }
  auto [sorted, order] = scores.sort(/*dim=*/-1, /*descending=*/false);
  at::Tensor out = sorted.softmax(-1).cumsum(-1).le(1.0 - p);
  out.narrow(-1, out.size(-1) - 1, 1).fill_(false);
  scores.masked_fill_(at::empty_like(out).scatter_(-1, order, out), kNever);
}

void keep_min_p(at::Tensor& scores, double p) {
  const at::Tensor probabilities = scores.softmax(-1);
  scores.masked_fill_(probabilities < probabilities.amax(-1, /*keepdim=*/true) * p, kNever);
}

void keep_likely(at::Tensor& scores, const SamplingOptions& options) {
  if (options.top_k == 0 && options.top_p == 1.0 && options.min_p == 0.0) return;
  if (ops::computes_on_gpu(scores)) {
    ops::keep_likely_tokens_(scores, options.top_k, options.top_p, options.min_p);
    return;
  }
  if (options.top_k > 0) keep_top_k(scores, options.top_k);
  if (options.top_p < 1.0) keep_top_p(scores, options.top_p, options.torch_draws);
  if (options.min_p > 0.0) keep_min_p(scores, options.min_p);
}

}  // namespace

void SamplingOptions::validate() const {
  constexpr std::string_view kWhere = "[generate] ";
  const auto share = [&](std::string_view name, double value) {
    QLORAPP_CHECK_VALUE(value >= 0 && value <= 1, "{}{} must be in [0, 1]; got {}.", kWhere, name, value);
  };
  QLORAPP_CHECK_VALUE(
      std::isfinite(temperature) && temperature > 0,
      "{}temperature must be a finite number > 0; got {}. For the most probable token leave out temperature and do_sample.", kWhere,
      temperature);
  QLORAPP_CHECK_VALUE(top_k >= 0, "{}top_k must be an integer >= 0 (0: all tokens); got {}.", kWhere, top_k);
  share("top_p", top_p);
  share("min_p", min_p);
  QLORAPP_CHECK_VALUE(std::isfinite(repetition_penalty) && repetition_penalty > 0,
                      "{}repetition_penalty must be a finite number > 0; got {}.", kWhere, repetition_penalty);
}

at::Tensor warped_logits(const at::Tensor& logits, const at::Tensor& seen, const at::Tensor& blocked,
                         const SamplingOptions& options) {
  at::Tensor scores = logits.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
  if (options.repetition_penalty != 1.0) {
    const at::Tensor penalized = chosen(scores < 0, scores * options.repetition_penalty, scores / options.repetition_penalty);
    scores = chosen(seen, penalized, scores);
  }
  if (blocked.defined()) scores.masked_fill_(blocked, kNever);
  if (!options.do_sample) return scores;
  if (options.temperature != 1.0) scores.div_(options.temperature);
  keep_likely(scores, options);
  return scores;
}

at::Tensor choose_tokens(const at::Tensor& logits, std::span<const int64_t> rows, std::span<const int64_t> positions,
                         const SamplingOptions& options) {
  if (!options.do_sample) return logits.argmax(-1);
  std::vector<double> draws;
  for (size_t i = 0; i < rows.size(); ++i) draws.push_back(uniform(options.seed, positions[i], rows[i]));
  const at::Tensor uniforms = on_device(draws, logits.device());
  if (ops::computes_on_gpu(logits)) return ops::draw_tokens(logits.to(at::kFloat).contiguous(), uniforms);
  const at::Tensor sums = logits.to(at::kDouble).softmax(-1).cumsum(-1);
  const at::Tensor total = sums.narrow(-1, sums.size(-1) - 1, 1);
  const at::Tensor draw = uniforms.unsqueeze(1) * total;
  // The first token whose sum lies above the draw: one of probability 0 adds nothing and is never it. Rounding up to the
  // total itself would name no token; the last with a probability is meant then.
  const at::Tensor last = sums.lt(total).sum(-1, /*keepdim=*/true);
  return at::minimum(sums.le(draw).sum(-1, /*keepdim=*/true), last).squeeze(1);
}

at::Tensor choose_tokens(const at::Tensor& logits, const at::Tensor& noise) { return logits.softmax(-1).div_(noise).argmax(-1); }

}  // namespace qlorapp
