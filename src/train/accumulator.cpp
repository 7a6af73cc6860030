// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/accumulator.hpp"

#include <iterator>

#include <ATen/ATen.h>

#include "core/check.hpp"

namespace qlorapp {
namespace {

int64_t over_ranks(int64_t count, const Accumulator::Options& options) {
  const int64_t total = options.sum_over_ranks ? options.sum_over_ranks(count) : count;
  QLORAPP_CHECK_VALUE(total >= count, "[Accumulator] the count over all ranks must be at least this rank's {}; got {}.", count,
                      total);
  return total;
}

void check_loss_sum(const at::Tensor& loss_sum) {
  QLORAPP_CHECK_VALUE(loss_sum.defined(), "[Accumulator] loss_sum must be a tensor; got an undefined one.");
  QLORAPP_CHECK_VALUE(loss_sum.numel() == 1,
                      "[Accumulator] loss_sum must be one number, the sum over a micro-batch's targets; got a shape of {}. Sum it "
                      "(at::Reduction::Sum).",
                      joined(loss_sum.sizes()));
  QLORAPP_CHECK_VALUE(at::isFloatingType(loss_sum.scalar_type()), "[Accumulator] loss_sum must be floating; got {}.",
                      at::toString(loss_sum.scalar_type()));
}

}  // namespace

Accumulator::Accumulator(std::span<const int64_t> target_counts, const Options& options) {
  for (const int64_t count : target_counts) {
    QLORAPP_CHECK_VALUE(count >= 0, "[Accumulator] a target count must be >= 0; got {}.", count);
    tokens_ += count;
  }
  size_ = std::ssize(target_counts);
  tokens_ = over_ranks(tokens_, options);
}

Accumulator::Accumulator(std::span<const Batch> window, const Options& options) {
  for (const Batch& batch : window) {
    QLORAPP_CHECK_VALUE(batch.target_count >= 0, "[Accumulator] a target count must be >= 0; got {}.", batch.target_count);
    tokens_ += batch.target_count + (options.count_position_zero ? batch.first_label_count : 0);
  }
  size_ = std::ssize(window);
  tokens_ = over_ranks(tokens_, options);
}

at::Tensor Accumulator::weight_tensor(at::Device device) const {
  return at::full({}, weight(), at::TensorOptions().dtype(at::kFloat).device(device));
}

at::Tensor Accumulator::share_of(const at::Tensor& loss_sum) {
  add(loss_sum);
  return tokens_ == 0 ? loss_sum * 0.0 : loss_sum / static_cast<double>(tokens_);
}

void Accumulator::add(const at::Tensor& loss_sum) {
  check_loss_sum(loss_sum);
  QLORAPP_CHECK_VALUE(added_ < size_,
                      "[Accumulator] each micro-batch of the window must give one loss; got one more than its {}. Call "
                      "share_of() or add() once per micro-batch, and make a new Accumulator for each window.",
                      size_);
  ++added_;
  const at::Tensor sum = loss_sum.detach().to(at::kDouble).reshape({});
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + sum : sum;
}

at::Tensor Accumulator::mean_loss() const {
  QLORAPP_CHECK_VALUE(added_ == size_,
                      "[Accumulator] mean_loss() needs one loss per micro-batch of the window; got {} of {}. Give each to "
                      "share_of() or add() first.",
                      added_, size_);
  if (!loss_sum_.defined()) return at::zeros({}, at::kDouble);
  return tokens_ == 0 ? at::zeros_like(loss_sum_) : loss_sum_ / static_cast<double>(tokens_);
}

}  // namespace qlorapp
