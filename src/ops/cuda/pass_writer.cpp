// SPDX-License-Identifier: Apache-2.0
#include "pass_writer.hpp"

#include <algorithm>
#include <bit>
#include <numbers>
#include <utility>

#include <ATen/ops/empty.h>

#include "launch.hpp"

namespace qlorapp::ops::gpu {
namespace {

using cuda::PassKind;
using cuda::PassPhase;

const void* address_of(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
bool is_placed_at(const void* address, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

}  // namespace

int multiprocessors() { return at::cuda::getCurrentDeviceProperties()->multiProcessorCount; }

PassWriter::PassWriter(const PassModel& model, int64_t rows, const at::TensorOptions& options)
    : model_(model), rows_(rows), options_(options) {}

bool PassWriter::write() {
  const PassBlock& first = model_.blocks.front();
  width_ = first.qkv.columns;
  nested_ = first.qkv.linears.front().nested_absmax.defined();
  const int64_t heads = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
  stream = matrix(width_), input_ = matrix(width_), branch_ = matrix(width_), qkv_ = matrix(heads);
  attended_ = matrix(model_.heads * model_.head_dim), h_ = matrix(first.down.columns);
  squares_ = squares(), branch_squares_ = squares();
  if (width_ % 16 != 0) return false;
  write_sum({}, first.before_attention);
  for (size_t i = 0; i < model_.blocks.size(); ++i) {
    const PassBlock& block = model_.blocks[i];
    const bool is_last = i + 1 == model_.blocks.size();
    PassPhase qkv = product(block.qkv, input_, block.before_attention);
    qkv.y = qkv_.mutable_data_ptr();
    if (!add(qkv)) return false;
    write_attention(block);
    if (!write_branch(block.o, attended_, block.after_attention, block.before_mlp, /*is_last=*/false)) return false;
    PassPhase gate_up = product(block.gate_up, input_, block.before_mlp);
    gate_up.gated = true;
    gate_up.activation = model_.activation;
    gate_up.y = h_.mutable_data_ptr();
    if (!add(gate_up)) return false;
    const at::Tensor next = is_last ? at::Tensor() : model_.blocks[i + 1].before_attention;
    if (!write_branch(block.down, h_, block.after_mlp, next, is_last)) return false;
  }
  int next = static_cast<int>(phases.size());
  for (int i = next - 1; i >= 0; --i) {
    phases[static_cast<size_t>(i)].next_product = next;
    if (phases[static_cast<size_t>(i)].kind == PassKind::kProduct) next = i;
  }
  return true;
}

at::Tensor PassWriter::matrix(int64_t columns) { return held.emplace_back(at::empty({rows_, columns}, options_)); }

at::Tensor PassWriter::squares() {
  return held.emplace_back(at::empty({width_ / 16, PassPhase::kSquaresEach}, options_.dtype(at::kFloat)));
}

PassPhase PassWriter::product(const PassGroup& group, const at::Tensor& x, const at::Tensor& norm) {
  PassPhase phase;
  phase.kind = PassKind::kProduct;
  phase.x = x.const_data_ptr();
  phase.k = static_cast<int>(group.columns);
  phase.eps = static_cast<float>(model_.eps);
  if (norm.defined()) phase.squares = squares_.const_data_ptr<float>();
  phase.a = address_of(group.a);
  phase.bias = address_of(group.bias);
  phase.wide_ranks = true;
  phase.ranks = group.a.defined() ? static_cast<int>(group.a.size(0)) : 0;
  is_known_ =
      is_known_ && group.linears.size() <= PassPhase::kMostWeights && x.size(1) == group.columns && is_placed_at(phase.a, 16);
  for (const PassLinear& linear : group.linears) {
    if (phase.count == PassPhase::kMostWeights) break;
    cuda::PassWeight& weight = phase.weights[phase.count++];
    weight.packed = linear.packed.const_data_ptr<uint8_t>();
    weight.absmax = linear.absmax.const_data_ptr();
    is_known_ = is_known_ && linear.nested_absmax.defined() == nested_ && is_placed_at(weight.packed, 16) &&
                is_placed_at(weight.absmax, nested_ ? 4 : 16);
    if (linear.nested_absmax.defined()) {
      weight.nested_absmax = linear.nested_absmax.const_data_ptr<float>();
      weight.nested_offset = linear.nested_offset.const_data_ptr<float>();
    }
    weight.n = static_cast<int>(linear.rows);
    weight.u_column = static_cast<int>(linear.u_column);
    if (linear.b.defined()) {
      is_known_ = is_known_ && linear.u_column + linear.b.size(1) <= phase.ranks;
      weight.b = linear.b.const_data_ptr();
      weight.rank = static_cast<int>(linear.b.size(1));
      weight.scaling = static_cast<float>(linear.scaling);
      phase.wide_ranks = phase.wide_ranks && weight.rank % 8 == 0 && weight.u_column % 8 == 0 && is_placed_at(weight.b, 16);
    }
    phase.width += weight.n;
  }
  phase.wide_ranks = phase.wide_ranks && phase.ranks % 8 == 0;
  return phase;
}

bool PassWriter::add(PassPhase& phase) {
  if (phase.gated) phase.width /= 2;
  if (!is_known_ || !cuda::divide_product(phase, static_cast<int>(rows_), multiprocessors())) return false;
  phase.formed = formed_ += phase.jobs;
  most_ranks = std::max<int64_t>(most_ranks, phase.ranks);
  phases.push_back(phase);
  return true;
}

void PassWriter::leave(PassPhase& phase, const at::Tensor& norm) {
  phase.next_x = input_.mutable_data_ptr();
  phase.next_norm = address_of(norm);
  is_known_ = is_known_ && is_placed_at(phase.next_norm, 8);
  if (norm.defined()) phase.next_squares = squares_.mutable_data_ptr<float>();
}

void PassWriter::write_sum(const at::Tensor& after, const at::Tensor& before_next, bool is_last) {
  PassPhase phase;
  phase.kind = PassKind::kSum;
  phase.k = phase.width = static_cast<int>(width_);
  phase.stream = stream.mutable_data_ptr();
  phase.eps = static_cast<float>(model_.eps);
  phase.factor = static_cast<float>(model_.residual_factor);
  if (after.defined()) {
    phase.x = branch_.const_data_ptr();
    phase.norm = address_of(after);
    is_known_ = is_known_ && is_placed_at(phase.norm, 8);
    phase.squares = branch_squares_.const_data_ptr<float>();
  }
  if (!is_last) leave(phase, before_next);
  phases.push_back(phase);
}

bool PassWriter::write_branch(const PassGroup& group, const at::Tensor& x, const at::Tensor& after, const at::Tensor& before_next,
                              bool is_last) {
  PassPhase phase = product(group, x, {});
  is_known_ = is_known_ && phase.width == width_;
  if (after.defined()) {
    phase.y = branch_.mutable_data_ptr();
    phase.next_squares = branch_squares_.mutable_data_ptr<float>();
    if (!add(phase)) return false;
    write_sum(after, before_next, is_last);
    return true;
  }
  phase.stream = stream.mutable_data_ptr();
  phase.factor = static_cast<float>(model_.residual_factor);
  if (!is_last) leave(phase, before_next);
  return add(phase);
}

void PassWriter::write_attention(const PassBlock& block) {
  PassPhase phase;
  phase.kind = PassKind::kAttention;
  phase.x = qkv_.const_data_ptr();
  phase.y = attended_.mutable_data_ptr();
  phase.keys = block.keys.mutable_data_ptr();
  phase.values = block.values.mutable_data_ptr();
  if (block.cos.defined()) {
    phase.cos = block.cos.const_data_ptr<float>();
    phase.sin = block.sin.const_data_ptr<float>();
    phase.half = static_cast<int>(block.cos.size(1));
  }
  phase.q_norm = address_of(block.of_queries);
  phase.k_norm = address_of(block.of_keys);
  phase.interleaved = model_.interleaved;
  phase.turns_before_norm = model_.turns_before_norm;
  phase.window = static_cast<int>(block.window);
  phase.eps = static_cast<float>(model_.eps);
  phase.scale = static_cast<float>(model_.attention_scale * std::numbers::log2e);
  phase.splits = cuda::attention_splits(static_cast<int>(rows_), static_cast<int>(model_.heads), static_cast<int>(model_.kv_heads),
                                        multiprocessors());
  phases.push_back(phase);
}

cuda::DecodePass described(const PassModel& model, const at::Tensor& numbers) {
  return {.phases = nullptr,
          .count = 0,
          .m = static_cast<int>(numbers.size(1)),
          .heads = static_cast<int>(model.heads),
          .kv_heads = static_cast<int>(model.kv_heads),
          .head_dim = static_cast<int>(model.head_dim),
          .positions = numbers.select(0, 0).const_data_ptr<int64_t>(),
          .slots = numbers.select(0, 1).const_data_ptr<int64_t>(),
          .starts = numbers.select(0, 2).const_data_ptr<int64_t>(),
          .lengths = numbers.select(0, 3).const_data_ptr<int64_t>(),
          .shared_starts = numbers.select(0, 4).const_data_ptr<int64_t>(),
          .shared_lengths = numbers.select(0, 5).const_data_ptr<int64_t>(),
          .nested_block_size = model.nested_block_size,
          .nested_shift = std::has_single_bit(static_cast<uint64_t>(model.nested_block_size))
                              ? std::countr_zero(static_cast<uint64_t>(model.nested_block_size))
                              : -1,
          .norm_rule = model.norm_rule,
          .quant_type = model.quant_type,
          .nested = model.blocks.front().qkv.linears.front().nested_absmax.defined()};
}

}  // namespace qlorapp::ops::gpu
