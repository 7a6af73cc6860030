// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/causal_lm.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/nn/segment_function.hpp"
#include "qlorapp/nn/trained_head.hpp"
#include "qlorapp/ops/cross_entropy.hpp"
#include "qlorapp/ops/device_memory.hpp"
#include "qlorapp/ops/embedding.hpp"
#include "qlorapp/ops/memory_tape.hpp"
#include "qlorapp/ops/norm.hpp"

namespace qlorapp {
namespace {

DecoderBlock::Shape block_shape(const format::ModelConfig& config) {
  return {config.hidden_size,         config.intermediate_size, config.num_attention_heads,
          config.num_key_value_heads, config.head_dim,          config.rms_norm_eps};
}

constexpr int64_t kFewTokens = 64;

void check_batch(const Batch& batch) {
  QLORAPP_CHECK_VALUE(batch.token_count() > 0, "[causal_lm] a batch must hold at least one token; got none.");
}

/// Where gradients of a block's adapters go when they go into the arena.
DecoderBlock::Gradients arena_gradients(const AdapterArena& arena, const std::array<AdapterSet::Slot, kProjectionCount>& slots) {
  DecoderBlock::Gradients gradients;
  for (size_t i = 0; i < kProjectionCount; ++i) {
    if (slots[i].a < 0) continue;
    gradients[i] = {arena.gradient(slots[i].a), arena.gradient(slots[i].b),
                    slots[i].magnitude >= 0 ? arena.gradient(slots[i].magnitude) : at::Tensor()};
  }
  return gradients;
}

}  // namespace

CausalLM::CausalLM(format::ModelConfig config, Weights weights)
    : config_(std::move(config)),
      embed_tokens_(std::move(weights.embed_tokens)),
      norm_(std::move(weights.norm)),
      lm_head_(std::move(weights.lm_head)) {
  const std::vector<int64_t> table{config_.vocab_size, config_.hidden_size};
  QLORAPP_CHECK_VALUE(embed_tokens_.sizes() == table && lm_head_.sizes() == table,
                      "[causal_lm] embedding and head must be (vocab_size, hidden_size) = ", table, "; got ",
                      embed_tokens_.sizes().vec(), " and ", lm_head_.sizes().vec(), ".");
  QLORAPP_CHECK_VALUE(std::ssize(weights.blocks) == config_.num_hidden_layers, "[causal_lm] the config has ",
                      config_.num_hidden_layers, " layers; got weights of ", weights.blocks.size(), ".");
  for (auto& block : weights.blocks) blocks_.emplace_back(block_shape(config_), std::move(block), std::ssize(blocks_));
  segments_ = keep_in_each_block(std::ssize(blocks_), Keep::kEverything);
  if (device().is_cpu() && dtype() != at::kFloat) ops::bound_primitive_cache();  // of dense layers, too
  const std::vector<float> frequencies = format::rope_inverse_frequencies(config_);
  rope_ = RopeTable(at::tensor(frequencies, at::TensorOptions().dtype(at::kFloat)).to(device()), 1.0);
}

std::vector<std::string> CausalLM::linear_names() const {
  static constexpr std::array<const char*, kProjectionCount> kSuffixes{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                                                       "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                                                       "mlp.down_proj"};
  std::vector<std::string> names;
  for (size_t block = 0; block < blocks_.size(); ++block) {
    for (const char* suffix : kSuffixes) names.push_back(concat("model.layers.", block, ".", suffix));
  }
  return names;
}

void CausalLM::set_segments(std::vector<Segment> segments) {
  int64_t next = 0;
  for (const Segment& segment : segments) {
    QLORAPP_CHECK_VALUE(segment.begin == next && segment.end > segment.begin,
                        "[checkpointing] segments must follow each other and cover all blocks; one is [", segment.begin, ", ",
                        segment.end, ") where ", next, " is next.");
    next = segment.end;
  }
  QLORAPP_CHECK_VALUE(next == std::ssize(blocks_), "[checkpointing] segments must cover all ", blocks_.size(),
                      " blocks; they end at ", next, ".");
  segments_ = std::move(segments);
  if (std::none_of(segments_.begin(), segments_.end(), [](const Segment& segment) { return segment.keep == Keep::kInputOnHost; })) {
    ring_.reset();
  } else if (!ring_ && on_gpu()) {
    ring_ = std::make_shared<PinnedRing>(device());
  }
}

void CausalLM::set_memory(const MemorySettings& settings) {
  settings.validate();
  memory_ = settings;
  const bool is_there = embed_tokens_.device() != device();
  if (!on_gpu() || lm_head_.is_alias_of(embed_tokens_) || settings.embedding_on_host == is_there) return;
  if (!settings.embedding_on_host) {
    embed_tokens_ = embed_tokens_.to(device());
  } else {
    const at::Tensor table = ops::empty_host_table(embed_tokens_.sizes(), dtype(), device());
    if (!device().is_meta()) table.copy_(embed_tokens_);
    embed_tokens_ = table;
  }
}

void CausalLM::set_float8(bool enabled) {
  at::Tensor ones;
  if (enabled) {
    QLORAPP_CHECK_VALUE(!device().is_cuda() || dtype() == at::kBFloat16,
                        "[fp8] on a GPU the rest of the step is in bfloat16; the model "
                        "computes in ",
                        c10::toString(dtype()), ". Load it with bnb_4bit_compute_dtype=bfloat16, or leave fp8 out.");
    const DecoderBlock::Shape shape = block_shape(config_);
    const int64_t longest = std::max({shape.hidden, shape.qkv_width(), 2 * shape.intermediate, shape.attention_width()});
    ones = at::ones({longest}, at::TensorOptions().dtype(at::kFloat).device(device()));
  }
  try {
    for (DecoderBlock& block : blocks_) block.set_float8(ones);
  } catch (...) {  // all or none
    for (DecoderBlock& block : blocks_) block.set_float8({});
    throw;
  }
}

/// Of logits at a time. Twice the memory of 1,024 buys a GPU a product of a better shape; a CPU gains nothing above 512.
int64_t CausalLM::loss_chunk_rows() const { return memory_.loss_chunk_rows > 0 ? memory_.loss_chunk_rows : on_gpu() ? 2048 : 512; }

StepContext CausalLM::make_context(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step) {
  int64_t longest = 0;
  for (size_t row = 0; row + 1 < batch.row_starts.size(); ++row) {
    longest = std::max(longest, batch.row_starts[row + 1] - batch.row_starts[row]);
  }
  rope_.reserve(longest);
  // A GPU multiplies projections that share an input as one, unless there are so few tokens that reading the weights is all.
  const bool eight_bits = training && float8() && batch.token_count() > kFewTokens;
  const bool stacked = eight_bits || (on_gpu() && batch.token_count() > kFewTokens);
  auto offload = ring_ ? std::make_shared<InputOffload>(ring_) : nullptr;
  StepContext context{rope_.cos(), rope_.sin(),    batch.positions, batch.row_starts,   seed,    micro_step,       training,
                      stacked,     deterministic_, eight_bits,      std::move(offload), memory_, batch.first_token};
  for (const DecoderBlock& block : blocks_) {
    QLORAPP_CHECK_VALUE(
        !eight_bits || block.stacked(context), "[fp8] adapters of block ", block.index(),
        " have dropout or DoRA, or weight_workspace is projection: then each weight is multiplied on its own, which "
        "is not done in eight bits. Set lora_dropout=0, use_dora=False and another weight_workspace, or leave fp8 out.");
  }
  return context;
}

/// Forward of a segment; `saved` gets one entry (what is kept outside backward), or is null.
at::Tensor CausalLM::run_segment(const Segment& segment, const at::Tensor& x, const StepContext& context,
                                 std::vector<Saved>* saved) const {
  // What backward needs first stays where it is.
  const bool to_host = segment.keep == Keep::kInputOnHost && segment.end < std::ssize(blocks_);
  if (segment.end - segment.begin == 1) {
    const Keep keep = segment.keep == Keep::kInputOnHost && !to_host ? Keep::kInputOnly : segment.keep;
    Saved one;
    at::Tensor y = blocks_[static_cast<size_t>(segment.begin)].forward(x, context, saved ? &one : nullptr, keep);
    if (saved) saved->push_back(std::move(one));
    return y;
  }
  std::optional<InputOffload::Copy> copy;
  if (saved && to_host && context.offload) copy.emplace(*context.offload, x, segment.end - 1);
  at::Tensor y = x;
  for (int64_t i = segment.begin; i < segment.end; ++i) {
    y = blocks_[static_cast<size_t>(i)].forward(y, context, nullptr, Keep::kInputOnly);
  }
  if (saved) {
    saved->emplace_back();
    saved->back().x = copy ? copy->host() : x;
    saved->back().x_on_host = copy.has_value();
  }
  return y;
}

/// Backward of a segment. Of several blocks all but the last run forward again keeping everything; the last one does so inside
/// its own backward, stopping before down_proj.
Wide CausalLM::run_segment_back(const Segment& segment, Wide dy, const StepContext& context, std::vector<Saved> saved,
                                const std::vector<DecoderBlock::Gradients>& gradients, bool need_dx) const {
  if (segment.end - segment.begin > 1 && context.offload && saved.front().x.device() != dy.buffer.device()) {
    saved.front().x = context.offload->load(saved.front().x, segment.end - 1);
  }
  at::Tensor x = saved.front().x;
  for (int64_t i = segment.begin; i + 1 < segment.end; ++i) {
    saved.emplace_back();
    Saved& slot = saved[static_cast<size_t>(i - segment.begin)];
    x = blocks_[static_cast<size_t>(i)].forward(x, context, &slot, Keep::kEverything);
    saved.back().x = x;
  }
  for (int64_t i = segment.end - 1; i >= segment.begin; --i) {
    Saved one = std::move(saved.back());
    saved.pop_back();
    dy = blocks_[static_cast<size_t>(i)].backward(std::move(dy), context, std::move(one),
                                                  gradients[static_cast<size_t>(i - segment.begin)], need_dx || i > segment.begin);
  }
  return dy;
}

at::Tensor CausalLM::trained_embedding() const {
  if (!has_adapters() || !adapters_enabled_) return {};
  const AdapterSet& set = adapters();
  return set.embed_tokens >= 0 ? set.arena.parameter(set.embed_tokens) : at::Tensor();
}

at::Tensor CausalLM::trained_head() const {
  if (!has_adapters() || !adapters_enabled_) return {};
  const AdapterSet& set = adapters();
  return set.lm_head >= 0 ? set.arena.parameter(set.lm_head) : at::Tensor();
}

at::Tensor CausalLM::embed(const at::Tensor& tokens) const {
  const at::Tensor table = trained_embedding();
  if (!table.defined()) return ops::embedding(embed_tokens_, tokens);
  // A plan's tensors: not every operator has a Meta kernel in C++.
  const at::Tensor rows =
      table.is_meta() ? at::empty({tokens.size(0), table.size(1)}, table.options()) : at::embedding(table, tokens);
  return rows.to(dtype());
}

at::Tensor CausalLM::head() const {
  const at::Tensor master = trained_head();
  return master.defined() ? master.to(dtype()) : lm_head_;
}

LossSum CausalLM::forward_backward(const Batch& batch, const at::Tensor& grad_scale, uint64_t seed, uint32_t micro_step) {
  check_batch(batch);
  QLORAPP_CHECK_VALUE(has_adapters(), "[causal_lm] there is nothing to train; call add_adapters first.");
  const at::NoGradGuard no_grad;
  ops::mark_phase(ops::MemoryPhase::kForward);
  const StepContext context = make_context(batch, /*training=*/true, seed, micro_step);
  std::vector<std::vector<Saved>> saved(segments_.size());
  at::Tensor x = embed(batch.tokens);
  for (size_t i = 0; i < segments_.size(); ++i) x = run_segment(segments_[i], x, context, &saved[i]);

  ops::mark_phase(ops::MemoryPhase::kLoss);
  at::Tensor loss;
  Wide dx;
  {
    auto [normed, rstd] = ops::rms_norm(x, norm_, config_.rms_norm_eps);
    at::Tensor dnormed;
    if (trained_head().defined()) {
      HeadPass pass =
          trained_head_pass(normed, head(), batch.targets, grad_scale, arena().gradient(adapters().lm_head), batch.target_count);
      loss = std::move(pass.loss);
      dnormed = std::move(pass.grad_hidden);
    } else {
      std::tie(loss, dnormed) = ops::linear_cross_entropy(normed, lm_head_, batch.targets, grad_scale, /*need_gradient=*/true,
                                                          loss_chunk_rows(), batch.target_count);
    }
    normed.reset();
    dx = {ops::rms_norm_backward(dnormed, x, norm_, rstd), config_.hidden_size};
  }
  x.reset();
  ops::mark_phase(ops::MemoryPhase::kBackward);
  const at::Tensor table = trained_embedding();
  const AdapterSet& set = adapters();
  for (size_t i = segments_.size(); i-- > 0;) {
    std::vector<DecoderBlock::Gradients> gradients;
    for (int64_t block = segments_[i].begin; block < segments_[i].end; ++block) {
      gradients.push_back(arena_gradients(set.arena, set.slots[static_cast<size_t>(block)]));
    }
    dx = run_segment_back(segments_[i], std::move(dx), context, std::move(saved[i]), gradients,
                          /*need_dx=*/i > 0 || table.defined());
  }
  if (table.defined()) {  // deterministic on a GPU too, unlike index_add_
    at::Tensor gradient = set.arena.gradient(set.embed_tokens);
    const at::Tensor rows = dx.values().to(gradient.scalar_type());
    if (!table.is_meta()) gradient.index_put_({batch.tokens}, rows, /*accumulate=*/true);
  }
  return {loss, batch.target_count};
}

at::Tensor CausalLM::hidden_states(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step) {
  check_batch(batch);
  auto context = std::make_shared<StepContext>(make_context(batch, training, seed, micro_step));
  at::Tensor x = embed(batch.tokens);
  const bool graph = at::GradMode::is_enabled() && has_adapters() && adapters_enabled_;
  for (const Segment& segment : segments_) {
    x = graph ? run_segment_autograd(*this, segment, x, context) : run_segment(segment, x, *context, nullptr);
  }
  return std::get<0>(ops::rms_norm(x, norm_, config_.rms_norm_eps));
}

at::Tensor CausalLM::loss(const Batch& batch, uint64_t seed, uint32_t micro_step) {
  return loss_of(hidden_states(batch, /*training=*/true, seed, micro_step), batch);
}

at::Tensor CausalLM::loss_of(const at::Tensor& hidden, const Batch& batch) const {
  const at::Tensor master = trained_head();
  if (master.defined() && at::GradMode::is_enabled() && (hidden.requires_grad() || master.requires_grad())) {
    return trained_head_loss(hidden, master, batch.targets);
  }
  if (master.defined()) {
    const at::Tensor own = head().detach();
    return std::get<0>(
        ops::linear_cross_entropy(hidden, own, batch.targets, std::nullopt, false, loss_chunk_rows(), batch.target_count));
  }
  return std::get<0>(ops::linear_cross_entropy(hidden, lm_head_, batch.targets, std::nullopt, hidden.requires_grad(),
                                               loss_chunk_rows(), batch.target_count));
}

at::Tensor CausalLM::logits(const at::Tensor& hidden) const { return at::linear(hidden, head()); }

GenerationCache CausalLM::make_cache(int64_t rows, int64_t capacity) const {
  GenerationCache cache{std::vector<KeyValueCache>(blocks_.size()), std::vector<int64_t>(static_cast<size_t>(rows), 0), capacity};
  for (KeyValueCache& block : cache.blocks) {
    block.keys = at::empty({rows * capacity, config_.num_key_value_heads, config_.head_dim}, norm_.options());
    block.values = at::empty_like(block.keys);
  }
  return cache;
}

at::Tensor CausalLM::forward_cached(const at::Tensor& tokens, std::span<const int64_t> rows, std::span<const int64_t> counts,
                                    GenerationCache& cache, bool every_token) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> positions, slots, row_starts{0}, last;
  CacheRows where;
  for (size_t i = 0; i < rows.size(); ++i) {
    int64_t& length = cache.lengths[static_cast<size_t>(rows[i])];
    QLORAPP_CHECK_VALUE(length + counts[i] <= cache.capacity, "[generate] the cache holds ", cache.capacity, " positions a row; ",
                        length + counts[i], " are needed.");
    where.starts.push_back(rows[i] * cache.capacity);
    for (int64_t k = 0; k < counts[i]; ++k) {
      positions.push_back(length + k);
      slots.push_back(where.starts.back() + length + k);
    }
    length += counts[i];
    rope_.reserve(length);
    where.lengths.push_back(length);
    row_starts.push_back(row_starts.back() + counts[i]);
    last.push_back(row_starts.back() - 1);
  }
  const auto on_device = [&](const std::vector<int64_t>& values) {
    return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(device());
  };
  where.slots = on_device(slots);
  const StepContext context{rope_.cos(),
                            rope_.sin(),
                            on_device(positions),
                            row_starts,
                            0,
                            0,
                            /*training=*/false,
                            /*stacked=*/false,
                            deterministic_,
                            /*float8=*/false,
                            nullptr,
                            {},
                            0};
  at::Tensor x = embed(tokens);
  for (size_t i = 0; i < blocks_.size(); ++i) x = blocks_[i].forward_cached(x, context, where, cache.blocks[i]);
  if (!every_token && tokens.size(0) > std::ssize(rows)) x = x.index_select(0, on_device(last));
  return std::get<0>(ops::rms_norm(x, norm_, config_.rms_norm_eps));
}

int64_t CausalLM::base_parameter_count() const {
  int64_t total = embed_tokens_.numel() + norm_.numel();
  if (!lm_head_.is_alias_of(embed_tokens_)) total += lm_head_.numel();
  for (const DecoderBlock& block : blocks_) {
    total += block.weights().input_norm.numel() + block.weights().post_attention_norm.numel();
    for (const FrozenWeight& weight : block.weights().projections) total += weight.out_features() * weight.in_features();
  }
  return total;
}

Bytes CausalLM::weight_bytes() const {
  Bytes total{static_cast<int64_t>(norm_.nbytes())};
  if (embed_tokens_.device() == device()) total += Bytes{static_cast<int64_t>(embed_tokens_.nbytes())};
  if (!lm_head_.is_alias_of(embed_tokens_)) total += Bytes{static_cast<int64_t>(lm_head_.nbytes())};
  for (const DecoderBlock& block : blocks_) {
    total += Bytes{static_cast<int64_t>(block.weights().input_norm.nbytes() + block.weights().post_attention_norm.nbytes())};
    for (const FrozenWeight& weight : block.weights().projections) total += weight.nbytes();
  }
  return total;
}

}  // namespace qlorapp
