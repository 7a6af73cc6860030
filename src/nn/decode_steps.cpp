// SPDX-License-Identifier: Apache-2.0
#include "nn/decode_steps.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "nn/decode_pass.hpp"
#include "nn/decoder.hpp"
#include "nn/generation_cache.hpp"
#include "ops/attention.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {
namespace {

/// A recording takes as long as some passes: one that few passes follow is not worth it.
constexpr int64_t kPassesFirst = 4;
constexpr int64_t kNumbers = 6;

/// At least `rows`, of few numbers: each has a recording of its own.
int64_t bucket_of(int64_t rows) {
  constexpr int64_t kFew = 32;
  return rows <= kFew ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows))) : (rows + kFew - 1) / kFew * kFew;
}

bool can_be_recorded(const CausalLM& model) {
  const Decoder& decoder = model.decoder();
  return ops::has_launch_graphs(model.device()) && !decoder.weight_stream() && !decoder.is_sharded() &&
         !decoder.embedding_on_host();
}

}  // namespace

std::shared_ptr<DecodeAdapters> DecodeSteps::adapters(const CausalLM& model, bool constant) {
  const bool are_same = adapters_ && adapters_->are_of(model);
  if (!are_same) adapters_ = DecodeAdapters::of(model);
  if (adapters_ && !(are_same && constant)) adapters_->refresh(model);
  return adapters_;
}

void DecodeSteps::forget() {
  steps_.clear();
  key_ = {};
}

at::Tensor DecodeSteps::compute(CausalLM& model, const Step& step, GenerationCache& cache) {
  Decoder& decoder = model.decoder();
  const int64_t rows = step.tokens.size(0);
  at::Tensor x = model.adapters().embed(step.tokens);
  if (step.pass) return std::get<0>(decoder.last_norm(step.pass->run(x)));
  CacheRows where{.slots = step.numbers.select(0, 1), .capacity = cache.capacity};
  if (*on_device_) {
    where.on_device = step.numbers.narrow(0, 2, 4);
  } else {
    const at::Tensor host = step.numbers.cpu();
    const auto* const numbers = host.const_data_ptr<int64_t>();
    int64_t i = 2;
    for (auto* list : {&where.starts, &where.lengths, &where.shared_starts, &where.shared_lengths}) {
      list->assign(numbers + i * rows, numbers + (i + 1) * rows);
      ++i;
    }
  }
  std::vector<int64_t> row_starts(static_cast<size_t>(rows) + 1);
  std::iota(row_starts.begin(), row_starts.end(), int64_t{0});
  const StepContext context{.rotations = decoder.rope().last(),
                            .positions = step.numbers.select(0, 0),
                            .row_starts = std::move(row_starts),
                            .training = false,
                            .deterministic = model.settings().deterministic(),
                            .offload = nullptr,
                            .weights = decoder.weight_stream(),
                            .few = adapters_ || !model.adapters().in_use(),
                            .adapters = adapters_,
                            .memory = {}};
  for (size_t i = 0; i < decoder.blocks().size(); ++i) {
    const BlockCache of_block{where, cache.blocks[i]};
    x = decoder.blocks()[i].forward(x, context, nullptr, Keep::kInputOnly, &of_block);
  }
  return std::get<0>(decoder.last_norm(x));
}

at::Tensor DecodeSteps::forward(CausalLM& model, const at::Tensor& tokens, std::span<const int64_t> rows, GenerationCache& cache) {
  const at::Device device = model.device();
  if (!on_device_) on_device_ = ops::has_decode_attention(device, model.dtype(), model.config().head_dim);
  static_cast<void>(adapters(model, cache.adapters_are_constant));
  const auto count = std::ssize(rows);
  const int64_t padded = *on_device_ ? bucket_of(count) : count;
  int64_t longest = 0;
  for (const int64_t row : rows) longest = std::max(longest, cache.lengths[static_cast<size_t>(row)]);
  std::vector<const void*> turns;
  for (const Rotation& rotation : model.decoder().rope().reserve(longest)) {
    turns.push_back(rotation.cos.defined() ? rotation.cos.const_data_ptr() : nullptr);
    turns.push_back(rotation.query_scale.defined() ? rotation.query_scale.const_data_ptr() : nullptr);
  }
  Key key{adapters_.get(), cache.blocks.front().keys.const_data_ptr(), std::move(turns), cache.capacity, model.adapters().in_use()};
  if (key != key_) {
    steps_.clear();
    key_ = std::move(key);
  }
  Step& step = steps_[padded];
  const auto integers = at::TensorOptions().dtype(at::kLong);
  if (!step.tokens.defined()) {
    step.tokens = at::empty({padded}, integers.device(device));
    step.numbers = at::empty({kNumbers, padded}, integers.device(device));
  }
  const at::Tensor host = at::empty({kNumbers, padded}, integers.pinned_memory(device.is_cuda()));
  auto* const numbers = host.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < padded; ++i) {
    const int64_t row = rows[static_cast<size_t>(i < count ? i : 0)], length = cache.lengths[static_cast<size_t>(row)];
    const RowPlace& place = cache.place(row);
    const std::array<int64_t, kNumbers> own{length - 1, place.start + length - 1, place.start,
                                            length,     place.shared_start,       place.shared};
    for (size_t k = 0; k < own.size(); ++k) numbers[static_cast<int64_t>(k) * padded + i] = own[k];
  }
  step.numbers.copy_(host, /*non_blocking=*/true);
  step.tokens.narrow(0, 0, count).copy_(tokens);
  if (padded > count) step.tokens.narrow(0, count, padded - count).copy_(step.tokens.narrow(0, 0, 1).expand({padded - count}));
  if (std::exchange(step.is_new, false) && *on_device_) step.pass = decode_pass_of(model, adapters_.get(), cache, step.numbers);
  if (step.graph) {
    step.graph->replay();
    return step.hidden.narrow(0, 0, count).clone();
  }
  if (!*on_device_ || ++step.passes != kPassesFirst || !can_be_recorded(model))
    return compute(model, step, cache).narrow(0, 0, count);
  step.hidden = at::empty({padded, model.config().hidden_size}, model.decoder().norm_weight().options());
  std::string why;
  step.graph = ops::record_launches(
      device, [&] { step.hidden.copy_(compute(model, step, cache)); }, &why);
  if (!step.graph) log_debug(message("[generate] passes of {} rows are not recorded: {}", padded, why));
  return step.hidden.narrow(0, 0, count).clone();
}

}  // namespace qlorapp
