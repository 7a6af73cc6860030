// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/causal_lm.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "nn/saved.hpp"
#include "nn/segments.hpp"
#include "nn/step_context.hpp"
#include "nn/trained_head.hpp"
#include "ops/cross_entropy.hpp"
#include "ops/dense_linear.hpp"
#include "ops/memory_tape.hpp"
#include "ops/norm.hpp"

namespace qlorapp {
namespace {

void check_batch(const Batch& batch) {
  QLORAPP_CHECK_VALUE(batch.token_count() > 0, "[causal_lm] a batch must hold at least one token; got none.");
}

/// Where gradients of a block's adapters go when they go into the arena.
DecoderBlock::Gradients arena_gradients(const AdapterArena& arena, const std::vector<AdapterSet::Slot>& slots) {
  DecoderBlock::Gradients gradients(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].a < 0) continue;
    gradients[i] = {arena.gradient(slots[i].a), arena.gradient(slots[i].b),
                    slots[i].magnitude >= 0 ? arena.gradient(slots[i].magnitude) : at::Tensor()};
  }
  return gradients;
}

}  // namespace

CausalLM::CausalLM(format::ModelConfig config, DecoderWeights weights)
    : decoder_(std::make_shared<Decoder>(std::move(config), std::move(weights))), adapters_(decoder_), settings_(decoder_) {}

LossSum CausalLM::forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& done) {
  check_batch(batch);
  QLORAPP_CHECK_VALUE(!adapters_.empty(), "[causal_lm] there is nothing to train; call add_adapters first.");
  const at::NoGradGuard no_grad;
  ops::mark_phase(ops::MemoryPhase::kForward);
  const StepContext context = settings_.context(batch, /*training=*/true, key.seed, key.micro_step);
  const Decoder& decoder = *decoder_;
  const std::vector<Segment>& segments = settings_.segments();
  const AdapterSet& set = adapters_.active();
  std::vector<std::vector<Saved>> saved(segments.size());
  at::Tensor x = adapters_.embed(batch.tokens);
  for (size_t i = 0; i < segments.size(); ++i) x = run_segment(decoder, segments[i], x, context, &saved[i]);

  ops::mark_phase(ops::MemoryPhase::kLoss);
  LossSum sum{.loss = {}, .targets = batch.target_count};
  if (settings_.token_statistics()) sum.statistics = at::zeros({2}, x.options().dtype(at::kFloat));
  const auto statistics = sum.statistics.defined() ? std::optional(sum.statistics) : std::nullopt;
  Wide dx;
  {
    auto [normed, rstd] = decoder_->last_norm(x);
    at::Tensor dnormed;
    if (adapters_.trained_head().defined()) {
      HeadPass pass = trained_head_pass(normed, adapters_.head(), batch.targets, decoder.logit_rule(), grad_scale,
                                        set.arena.gradient(set.lm_head), batch.target_count, statistics);
      sum.loss = std::move(pass.loss);
      dnormed = std::move(pass.grad_hidden);
    } else {
      std::tie(sum.loss, dnormed) = ops::linear_cross_entropy(normed, decoder.lm_head(), batch.targets, grad_scale,
                                                              /*need_gradient=*/true, settings_.loss_chunk_rows(),
                                                              batch.target_count, decoder.logit_rule(), statistics);
    }
    normed.reset();
    dx = {ops::rms_norm_backward(dnormed, x, decoder.norm_weight(), rstd, config().family->norm_rule), config().hidden_size};
  }
  x.reset();
  ops::mark_phase(ops::MemoryPhase::kBackward);
  const at::Tensor table = adapters_.trained_embedding();
  for (size_t i = segments.size(); i-- > 0;) {
    std::vector<DecoderBlock::Gradients> gradients;
    for (int64_t block = segments[i].begin; block < segments[i].end; ++block) {
      gradients.push_back(arena_gradients(set.arena, set.slots[static_cast<size_t>(block)]));
    }
    dx = run_segment_back(decoder, segments[i], std::move(dx), context, std::move(saved[i]), gradients,
                          /*need_dx=*/i > 0 || table.defined());
    if (done) done(segments[i].begin);
  }
  if (table.defined()) {  // deterministic on a GPU too, unlike index_add_
    at::Tensor gradient = set.arena.gradient(set.embed_tokens);
    at::Tensor rows = dx.values().to(gradient.scalar_type());
    if (const double factor = decoder.embedding_factor(); factor != 1) rows = rows * factor;
    if (!table.is_meta()) gradient.index_put_({batch.tokens}, rows, /*accumulate=*/true);
  }
  return sum;
}

at::Tensor CausalLM::hidden_states(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step) {
  check_batch(batch);
  auto context = std::make_shared<StepContext>(settings_.context(batch, training, seed, micro_step));
  at::Tensor x = adapters_.embed(batch.tokens);
  const bool graph = at::GradMode::is_enabled() && adapters_.in_use();
  for (const Segment& segment : settings_.segments()) {
    x = graph ? run_segment_autograd(decoder_, segment, x, context) : run_segment(*decoder_, segment, x, *context, nullptr);
  }
  return std::get<0>(decoder_->last_norm(x));
}

at::Tensor CausalLM::loss(const Batch& batch, uint64_t seed, uint32_t micro_step) {
  return loss_of(hidden_states(batch, /*training=*/true, seed, micro_step), batch);
}

at::Tensor CausalLM::loss_of(const at::Tensor& hidden, const Batch& batch) const {
  const at::Tensor master = adapters_.trained_head();
  if (master.defined() && at::GradMode::is_enabled() && (hidden.requires_grad() || master.requires_grad())) {
    return trained_head_loss(hidden, master, batch.targets, decoder_->logit_rule());
  }
  if (master.defined()) {
    const at::Tensor own = adapters_.head().detach();
    return std::get<0>(ops::linear_cross_entropy(hidden, own, batch.targets, std::nullopt, false, settings_.loss_chunk_rows(),
                                                 batch.target_count, decoder_->logit_rule()));
  }
  return std::get<0>(ops::linear_cross_entropy(hidden, decoder_->lm_head(), batch.targets, std::nullopt, hidden.requires_grad(),
                                               settings_.loss_chunk_rows(), batch.target_count, decoder_->logit_rule()));
}

at::Tensor CausalLM::logits(const at::Tensor& hidden) const {
  const auto [factor, cap] = decoder_->logit_rule();
  at::Tensor logits = ops::dense_linear(hidden, adapters_.head());
  if (factor != 1) logits = logits * factor;
  return cap == 0 ? logits : (logits / cap).tanh() * cap;
}

AdapterArena& CausalLM::arena() { return adapters_.active().arena; }
const AdapterArena& CausalLM::arena() const { return adapters_.active().arena; }
const LoraConfig& CausalLM::lora_config() const { return adapters_.active().config; }
const format::ModelConfig& CausalLM::config() const { return decoder_->config(); }
std::vector<DecoderBlock>& CausalLM::blocks() { return decoder_->blocks(); }
const std::vector<DecoderBlock>& CausalLM::blocks() const { return std::as_const(*decoder_).blocks(); }
at::Device CausalLM::device() const { return decoder_->device(); }
at::ScalarType CausalLM::dtype() const { return decoder_->dtype(); }

}  // namespace qlorapp
