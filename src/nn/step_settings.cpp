// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/step_settings.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "nn/input_offload.hpp"
#include "nn/step_context.hpp"
#include "qlorapp/nn/batch.hpp"

namespace qlorapp {
StepSettings::StepSettings(std::shared_ptr<Decoder> decoder)
    : decoder_(std::move(decoder)), segments_(keep_in_each_block(std::ssize(decoder_->blocks()), Keep::kEverything)) {
  memory_.base_on_host = decoder_->residency() == Residency::kHost;
}

bool StepSettings::float8() const { return decoder_->blocks().front().in_float8(); }

void StepSettings::set_segments(std::vector<Segment> segments) {
  const size_t blocks = decoder_->blocks().size();
  int64_t next = 0;
  for (const Segment& segment : segments) {
    QLORAPP_CHECK_VALUE(segment.begin == next && segment.end > segment.begin,
                        "[checkpointing] segments must follow each other and cover all blocks; one is [{}, {}) where {} is next.",
                        segment.begin, segment.end, next);
    next = segment.end;
  }
  QLORAPP_CHECK_VALUE(next == static_cast<int64_t>(blocks), "[checkpointing] segments must cover all {} blocks; they end at {}.",
                      blocks, next);
  segments_ = std::move(segments);
  if (std::none_of(segments_.begin(), segments_.end(), [](const Segment& segment) { return segment.keep == Keep::kInputOnHost; })) {
    ring_.reset();
  } else if (!ring_ && decoder_->on_gpu()) {
    ring_ = std::make_shared<PinnedRing>(decoder_->device());
  }
}

void StepSettings::set_memory(const MemorySettings& settings) {
  settings.validate();
  decoder_->move_blocks(settings.base_on_host && decoder_->on_gpu());
  decoder_->move_embedding(settings.embedding_on_host);
  memory_ = settings;
}

void StepSettings::set_float8(bool enabled) {
  at::Tensor ones;
  if (enabled) {
    const at::Device device = decoder_->device();
    QLORAPP_CHECK_VALUE(!device.is_cuda() || decoder_->dtype() == at::kBFloat16,
                        "[fp8] on a GPU the rest of the step is in bfloat16; the model computes in {}. Load it with "
                        "bnb_4bit_compute_dtype=bfloat16, or leave fp8 out.",
                        c10::toString(decoder_->dtype()));
    const DecoderBlock::Shape& shape = decoder_->blocks().front().shape();
    const int64_t longest = std::max({shape.hidden, shape.qkv_width(), 2 * shape.intermediate, shape.attention_width()});
    ones = at::ones({longest}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  try {
    for (DecoderBlock& block : decoder_->blocks())
      block.set_float8(ones, enabled ? decoder_->projections(block.index()) : BlockWeights());
  } catch (...) {  // all or none
    for (DecoderBlock& block : decoder_->blocks()) block.set_float8({}, {});
    throw;
  }
}

int64_t StepSettings::loss_chunk_rows() const {
  return memory_.loss_chunk_rows_on(decoder_->on_gpu(), decoder_->config().vocab_size);
}

StepContext StepSettings::context(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step) const {
  int64_t longest = 0;
  for (size_t row = 0; row + 1 < batch.row_starts.size(); ++row) {
    longest = std::max(longest, batch.row_starts[row + 1] - batch.row_starts[row]);
  }
  // A GPU multiplies projections that share an input as one, unless there are so few tokens that reading the weights is all.
  const bool eight_bits = training && float8() && batch.token_count() > kFewTokens;
  StepContext context{.rotations = decoder_->rope().reserve(longest),
                      .positions = batch.positions,
                      .row_starts = batch.row_starts,
                      .seed = seed,
                      .micro_step = micro_step,
                      .training = training,
                      .stacked = eight_bits || (decoder_->on_gpu() && batch.token_count() > kFewTokens),
                      .deterministic = deterministic_,
                      .float8 = eight_bits,
                      .offload = ring_ ? std::make_shared<InputOffload>(ring_) : nullptr,
                      .weights = decoder_->weight_stream(),
                      .squares = squares_,
                      .memory = memory_,
                      .first_row = batch.first_token};
  for (const DecoderBlock& block : decoder_->blocks()) {
    QLORAPP_CHECK_VALUE(
        !eight_bits || block.stacked(context),
        "[fp8] adapters of block {} have dropout or DoRA, or weight_workspace is projection: then each weight is multiplied on its "
        "own, which is not done in eight bits. Set lora_dropout=0, use_dora=False and another weight_workspace, or leave fp8 out.",
        block.index());
  }
  return context;
}

}  // namespace qlorapp
