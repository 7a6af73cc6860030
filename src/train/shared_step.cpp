// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/shared_step.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>

#include "core/check.hpp"

namespace qlorapp {
namespace {

/// The number behind "layers." in a parameter's name.
std::optional<size_t> block_of(std::string_view name) {
  constexpr std::string_view kBefore = "layers.";
  const size_t at = name.find(kBefore);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(at + kBefore.size());
  size_t block = 0;
  if (std::from_chars(digits.data(), digits.data() + digits.size(), block).ec != std::errc{}) return std::nullopt;
  return block;
}

}  // namespace

std::vector<int64_t> block_starts(const AdapterArena& arena) {
  struct Range {
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  };
  std::vector<Range> blocks;
  for (const AdapterArena::Entry& entry : arena.entries()) {
    const std::optional<size_t> block = block_of(entry.name);
    if (!block) continue;
    if (blocks.size() <= *block) blocks.resize(*block + 1);
    blocks[*block].begin = std::min(blocks[*block].begin, entry.offset);
    blocks[*block].end = std::max(blocks[*block].end, entry.offset + entry.numel);
  }
  std::vector<int64_t> starts;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].end == 0 || (i > 0 && blocks[i].begin < blocks[i - 1].end)) return {};
    starts.push_back(blocks[i].begin);
  }
  // Trained tables get their last gradients when the backward pass ends, so they must stand before the blocks.
  for (const AdapterArena::Entry& entry : arena.entries()) {
    if (!starts.empty() && !block_of(entry.name) && entry.offset > starts.front()) return {};
  }
  return starts;
}

WindowCounts sum_counts(Communicator& ranks, const WindowCounts& own) {
  const std::vector<int64_t> sums = sum_over(ranks, {own.targets, own.micro_batches, own.input_tokens});
  return {.targets = sums[0], .micro_batches = sums[1], .input_tokens = sums[2]};
}

SumCounts sum_counts_once() {
  return [met = std::make_shared<std::optional<WindowCounts>>()](Communicator& ranks, const WindowCounts& own) {
    if (!*met) *met = sum_counts(ranks, own);
    return **met;
  };
}

SharedStep::SharedStep(const TrainState& run, std::span<const Batch> window, SumCounts sum)
    : run_(run),
      window_(window),
      ranks_(run.ranks && run.ranks->size() > 1 ? run.ranks.get() : nullptr),
      sum_(sum ? std::move(sum) : SumCounts(sum_counts)) {
  for (const Batch& batch : window) {
    if (batch.is_filler) continue;
    counts_.micro_batches += batch.first_token == 0 ? 1 : 0;
    counts_.input_tokens += batch.token_count();
  }
}

int64_t SharedStep::meet(int64_t targets) {
  counts_.targets = targets;
  if (ranks_ != nullptr) counts_ = sum_(*ranks_, counts_);
  return counts_.targets;
}

StepKey SharedStep::next_key(const Batch& batch) {
  if (batch.first_token == 0) ++begun_;  // a filler is the last
  const int64_t mine = begun_ - 1;
  const int64_t place = ranks_ == nullptr ? mine : mine * ranks_->size() + ranks_->rank();
  return {.seed = run_.seed, .micro_step = run_.micro_step + static_cast<uint32_t>(place)};
}

BlockDone SharedStep::on_block_done(const Batch& batch) {
  if (ranks_ == nullptr || &batch != &window_.back() || !run_.arena->gradients().is_cuda()) return {};
  first_elements_ = block_starts(*run_.arena);
  if (first_elements_.empty()) return {};
  return [this](int64_t block) { begin(first_elements_[static_cast<size_t>(block)]); };
}

void SharedStep::begin(int64_t first_element) {
  const at::Tensor& all = run_.arena->gradients();
  const int64_t end = summed_from_ < 0 ? all.numel() : summed_from_;
  summed_from_ = first_element;
  if (first_element == end) return;
  const at::Tensor slice = all.slice(0, first_element, end);
  if (!run_.sums_in_bf16) {
    exchanges_.push_back(ranks_->all_reduce(slice));
    return;
  }
  rounded_.emplace_back(slice, slice.to(at::kBFloat16));
  exchanges_.push_back(ranks_->all_reduce(rounded_.back().second));
}

void SharedStep::sum_gradients_and(at::Tensor& mean_loss) {
  if (ranks_ == nullptr) return;
  // Each rank makes the same exchanges, also one whose window was empty.
  if (run_.arena->gradients().is_cuda() && summed_from_ < 0) {
    first_elements_ = block_starts(*run_.arena);
    for (size_t block = first_elements_.size(); block-- > 0;) begin(first_elements_[block]);
  }
  begin(0);
  mean_loss = mean_loss.to(run_.arena->gradients().device());
  exchanges_.push_back(ranks_->all_reduce(mean_loss));
  for (Exchange& exchange : exchanges_) exchange.wait();
  for (auto& [slice, sum] : rounded_) slice.copy_(sum);
}

}  // namespace qlorapp
