// SPDX-License-Identifier: Apache-2.0
#include "nn/generation_cache.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>

#include "core/check.hpp"
#include "nn/decode_steps.hpp"
#include "nn/decoder.hpp"
#include "nn/generation_size.hpp"
#include "nn/host_values.hpp"
#include "nn/step_context.hpp"
#include "ops/attention.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {
namespace {

/// (rows · capacity, H, D) as (rows, capacity, H, D).
at::Tensor by_row(const at::Tensor& slots, int64_t rows) { return slots.unflatten(0, {rows, -1}); }

/// So few new tokens of a row, behind others, attend as rows of one token each.
constexpr int64_t kFewOfRow = 16;

/// Threads that generate with one model share its tables of rotations, which a pass may replace.
std::mutex passes;

}  // namespace

void GenerationCache::reserve(int64_t wanted) {
  if (wanted <= capacity) return;
  const int64_t grown = std::max(wanted, 2 * capacity);
  const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  if (steps) steps->forget();
  for (KeyValueCache& block : blocks) {
    for (at::Tensor* slots : {&block.keys, &block.values}) {
      at::Tensor larger = at::empty({row_count() * grown, slots->size(1), slots->size(2)}, slots->options());
      if (longest > 0) by_row(larger, row_count()).narrow(1, 0, longest).copy_(by_row(*slots, row_count()).narrow(1, 0, longest));
      *slots = std::move(larger);
    }
  }
  capacity = grown;
  place_rows();
}

void GenerationCache::select_rows(std::span<const int64_t> rows) {
  std::vector<int64_t> chosen;
  for (const int64_t row : rows) {
    QLORAPP_CHECK_VALUE(row >= 0 && row < row_count(), "[cache] rows must be from 0 to {}; got {}.", row_count() - 1, row);
    chosen.push_back(lengths[static_cast<size_t>(row)]);
  }
  const int64_t before = row_count();
  // Recorded passes read keys and values where they are: as many rows stay there. Others are read no more, so their memory goes block by block.
  const bool stay = std::ssize(chosen) == before && !blocks.empty() && blocks.front().keys.is_cuda();
  if (steps && !stay) steps->forget();
  for (KeyValueCache& block : blocks) {
    const at::Tensor index = at::tensor(at::IntArrayRef(rows.data(), rows.size()), at::kLong).to(block.keys.device());
    for (at::Tensor* slots : {&block.keys, &block.values}) {
      at::Tensor selected = by_row(*slots, before).index_select(0, index).flatten(0, 1);
      if (stay) slots->copy_(selected);
      else *slots = std::move(selected);
    }
  }
  lengths = std::move(chosen);
  place_rows();
}

void GenerationCache::place_rows() {
  places.clear();
  for (int64_t row = 0; row < row_count(); ++row) places.push_back({.start = row * capacity});
}

void GenerationCache::remove_last(int64_t count) {
  for (const int64_t length : lengths) {
    QLORAPP_CHECK_VALUE(count >= 0 && count <= length, "[cache] cannot remove {} positions from a row that has {}.", count, length);
  }
  for (int64_t& length : lengths) length -= count;
}

GenerationCache make_cache(const CausalLM& model, int64_t rows, int64_t capacity) {
  GenerationCache cache = make_cache(model, rows, capacity, rows * capacity);
  cache.place_rows();
  return cache;
}

GenerationCache make_cache(const CausalLM& model, int64_t rows, int64_t capacity, int64_t slots) {
  const format::ModelConfig& config = model.config();
  GenerationCache cache{.blocks = std::vector<KeyValueCache>(model.blocks().size()),
                        .lengths = std::vector<int64_t>(static_cast<size_t>(rows), 0),
                        .capacity = capacity,
                        .places = std::vector<RowPlace>(static_cast<size_t>(rows))};
  for (KeyValueCache& block : cache.blocks) {
    block.keys = at::empty({slots, config.num_key_value_heads, config.head_dim}, model.decoder().norm_weight().options());
    block.values = at::empty_like(block.keys);
  }
  return cache;
}

int64_t cache_bytes_per_position(const CausalLM& model) { return cache_per_position(model.config(), model.dtype()).count; }

at::Tensor forward_cached(CausalLM& model, const at::Tensor& tokens, std::span<const int64_t> rows, std::span<const int64_t> counts,
                          GenerationCache& cache, bool every_token) {
  const at::NoGradGuard no_grad;
  Decoder& decoder = model.decoder();
  const std::lock_guard turn(passes);
  std::vector<int64_t> positions, slots, row_starts{0}, last;
  const bool all_new = std::ranges::all_of(rows, [&](int64_t row) { return cache.lengths[static_cast<size_t>(row)] == 0; });
  const bool apart = !all_new && std::ranges::all_of(counts, [](int64_t count) { return count <= kFewOfRow; });
  CacheRows where{.capacity = cache.capacity, .all_new = all_new};
  for (size_t i = 0; i < rows.size(); ++i) {
    int64_t& length = cache.lengths[static_cast<size_t>(rows[i])];
    QLORAPP_CHECK_VALUE(length + counts[i] <= cache.capacity, "[generate] the cache holds {} positions a row; {} are needed.",
                        cache.capacity, length + counts[i]);
    QLORAPP_CHECK_VALUE(counts[i] > 0, "[generate] row {} must have a token to compute; got none.", rows[i]);
    const RowPlace& place = cache.place(rows[i]);
    for (int64_t k = 1; k <= counts[i]; ++k) {
      positions.push_back(length);
      slots.push_back(place.start + length);
      ++length;
      if (!apart && k < counts[i]) continue;
      where.starts.push_back(place.start);
      where.lengths.push_back(length);
      where.shared_starts.push_back(place.shared_start);
      where.shared_lengths.push_back(place.shared);
      row_starts.push_back(std::ssize(positions));
    }
    last.push_back(std::ssize(positions) - 1);
  }
  if (!cache.steps) cache.steps = std::make_shared<DecodeSteps>();
  const bool one_each = !all_new && tokens.size(0) == std::ssize(rows);
  // A plan's tokens have no values that a step could bring to the host; what it allocates is the same here.
  if (one_each && !tokens.is_meta()) return cache.steps->forward(model, tokens, rows, cache);
  where.slots = on_device(slots, model.device());
  if (apart && ops::has_decode_attention(model.device(), model.dtype(), model.config().head_dim)) {
    std::vector<int64_t> all;
    for (const auto* list : {&where.starts, &where.lengths, &where.shared_starts, &where.shared_lengths})
      all.insert(all.end(), list->begin(), list->end());
    where.on_device = on_device(all, model.device()).view({4, -1});
  }
  const bool stacked = decoder.on_gpu() && tokens.size(0) > kFewTokens && !one_each;
  const auto copied = [&] {
    const ops::MemoryUseScope use(ops::MemoryUse::kAdapters);
    return cache.steps->adapters(model, cache.adapters_are_constant);
  };
  const std::shared_ptr<const DecodeAdapters> adapters = stacked ? nullptr : copied();
  const StepContext context{.rotations = decoder.rope().reserve(std::ranges::max(where.lengths)),
                            .positions = on_device(positions, model.device()),
                            .row_starts = row_starts,
                            .training = false,
                            .stacked = stacked,
                            .deterministic = model.settings().deterministic(),
                            .offload = nullptr,
                            .weights = decoder.weight_stream(),
                            .few = !stacked && (adapters || !model.adapters().in_use()),
                            .adapters = adapters,
                            .memory = {}};
  at::Tensor x = model.adapters().embed(tokens);
  for (size_t i = 0; i < decoder.blocks().size(); ++i) {
    const BlockCache of_block{where, cache.blocks[i]};
    x = decoder.blocks()[i].forward(x, context, nullptr, Keep::kInputOnly, &of_block);
  }
  if (!every_token && tokens.size(0) > std::ssize(rows))
    x = x.is_meta() ? at::empty({std::ssize(rows), x.size(1)}, x.options()) : x.index_select(0, on_device(last, model.device()));
  return std::get<0>(decoder.last_norm(x));
}

}  // namespace qlorapp
