// SPDX-License-Identifier: Apache-2.0
#include "segments.hpp"
#include "nn/decoder.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

namespace qlorapp {

at::Tensor run_segment(const Decoder& decoder, const Segment& segment, const at::Tensor& x, const StepContext& context,
                       std::vector<Saved>* saved) {
  const std::vector<DecoderBlock>& blocks = decoder.blocks();
  // Backward needs the last segment first, so it stays on the device.
  const bool to_host = segment.keep == Keep::kInputOnHost && segment.end < std::ssize(blocks);
  if (segment.end - segment.begin == 1) {
    const Keep keep = segment.keep == Keep::kInputOnHost && !to_host ? Keep::kInputOnly : segment.keep;
    Saved one;
    at::Tensor y = blocks[static_cast<size_t>(segment.begin)].forward(x, context, saved ? &one : nullptr, keep);
    if (saved) saved->push_back(std::move(one));
    return y;
  }
  std::optional<InputOffload::Copy> copy;
  if (saved && to_host && context.offload) copy.emplace(*context.offload, x, segment.end - 1);
  at::Tensor y = x;
  for (int64_t i = segment.begin; i < segment.end; ++i) {
    y = blocks[static_cast<size_t>(i)].forward(y, context, nullptr, Keep::kInputOnly);
  }
  if (saved) {
    saved->emplace_back();
    saved->back().x = copy ? copy->host() : x;
    saved->back().x_on_host = copy.has_value();
  }
  return y;
}

Wide run_segment_back(const Decoder& decoder, const Segment& segment, Wide dy, const StepContext& context, std::vector<Saved> saved,
                      const std::vector<DecoderBlock::Gradients>& gradients, bool need_dx) {
  const std::vector<DecoderBlock>& blocks = decoder.blocks();
  if (segment.end - segment.begin > 1 && context.offload && saved.front().x.device() != dy.buffer.device()) {
    saved.front().x = context.offload->load(saved.front().x, segment.end - 1);
  }
  at::Tensor x = saved.front().x;
  for (int64_t i = segment.begin; i + 1 < segment.end; ++i) {
    saved.emplace_back();
    Saved& slot = saved[static_cast<size_t>(i - segment.begin)];
    x = blocks[static_cast<size_t>(i)].forward(x, context, &slot, Keep::kEverything);
    saved.back().x = x;
  }
  for (int64_t i = segment.end - 1; i >= segment.begin; --i) {
    Saved one = std::move(saved.back());
    saved.pop_back();
    dy = blocks[static_cast<size_t>(i)].backward(std::move(dy), context, std::move(one),
                                                 gradients[static_cast<size_t>(i - segment.begin)], need_dx || i > segment.begin);
  }
  return dy;
}

}  // namespace qlorapp
