// SPDX-License-Identifier: Apache-2.0
#include "cuda/wide_pass.hpp"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "cuda/decode_attention.hpp"
#include "launch.hpp"
#include "pass_writer.hpp"

namespace qlorapp::ops {
namespace {

using cuda::PassKind;
using cuda::PassPhase;

/// The phases one after the other. What is between two launches is allocated for the time of a pass.
class WidePass final : public DecodePass {
 public:
  WidePass(PassModel model, gpu::PassWriter writer, const at::Tensor& numbers)
      : model_(std::move(model)),
        numbers_(numbers),
        phases_(std::move(writer.phases)),
        held_(std::move(writer.held)),
        stream_(std::move(writer.stream)),
        pass_(gpu::described(model_, numbers)),
        ranks_(writer.most_ranks) {
    for (size_t i = 0; i < phases_.size(); ++i) {
      const PassPhase& phase = phases_[i];
      if (phase.kind != PassKind::kProduct) continue;
      floats_ = std::max(floats_, cuda::wide_floats(pass_, phase, gpu::multiprocessors()));
      columns_ = std::max<int64_t>(columns_, phase.k);
    }
    for (const PassPhase& phase : phases_) {
      if (phase.kind != PassKind::kAttention) continue;
      attention_floats_ = std::max(attention_floats_, cuda::decode_partial_floats(attention_of(phase)));
    }
  }

  [[nodiscard]] bool has_kernels() const {
    return std::ranges::all_of(
        phases_, [&](const PassPhase& phase) { return phase.kind != PassKind::kProduct || cuda::has_wide_pass(pass_, phase); });
  }

  at::Tensor run(const at::Tensor& x) override {
    const gpu::Launch launch(x);
    stream_.copy_(x);
    const at::TensorOptions options = stream_.options();
    const at::Tensor partial = at::empty({std::max(floats_, attention_floats_)}, options.dtype(at::kFloat));
    const at::Tensor laid = at::empty({2, cuda::wide_laid_bytes(pass_.m, columns_)}, options.dtype(at::kByte));
    const at::Tensor u = at::empty({pass_.m, ranks_}, options);
    pass_.u = u.mutable_data_ptr();
    unsigned char *own = laid.mutable_data_ptr<uint8_t>(), *next = own + laid.size(1);
    const void* laid_x = nullptr;  // the matrix that lies in `own`
    for (size_t i = 0; i < phases_.size(); ++i) {
      const PassPhase& phase = phases_[i];
      if (phase.kind == PassKind::kAttention) {
        cuda::DecodeAttention attention = attention_of(phase);
        attention.partial = partial.mutable_data_ptr<float>();
        C10_CUDA_CHECK(cuda::decode_attention(attention, launch.stream()));
        continue;
      }
      const void* const written = phase.gated ? phase.y : phase.next_x;  // and laid
      if (phase.kind == PassKind::kSum) {
        C10_CUDA_CHECK(cuda::wide_sum(pass_, phase, written != nullptr ? next : nullptr, launch.stream()));
      } else {
        const PassPhase* const after =
            i + 1 < phases_.size() && phases_[i + 1].kind == PassKind::kAttention ? &phases_[i + 1] : nullptr;
        const cuda::WideMemory memory{.partial = partial.mutable_data_ptr<float>(),
                                      .laid = own,
                                      .is_laid = laid_x == phase.x,
                                      .next = written != nullptr ? next : nullptr};
        C10_CUDA_CHECK(cuda::wide_product(pass_, phase, after, memory, gpu::multiprocessors(), launch.stream()));
      }
      if (written != nullptr) std::swap(own, next);
      laid_x = written;
    }
    return stream_;
  }

 private:
  [[nodiscard]] cuda::DecodeAttention attention_of(const PassPhase& phase) const {
    const int64_t dim = model_.head_dim, width = (model_.heads + 2 * model_.kv_heads) * dim, slots = model_.kv_heads * dim;
    const int64_t most = phase.window > 0 ? std::min<int64_t>(phase.window, model_.capacity) : model_.capacity;
    return {.type = cuda::Float::kBFloat16,
            .q = phase.x,
            .k = phase.keys,
            .v = phase.values,
            .out = phase.y,
            .partial = nullptr,
            .starts = pass_.starts,
            .lengths = pass_.lengths,
            .shared_starts = pass_.shared_starts,
            .shared_lengths = pass_.shared_lengths,
            .q_row_stride = width,
            .q_head_stride = dim,
            .slot_stride = slots,
            .kv_head_stride = dim,
            .rows = pass_.m,
            .heads = model_.heads,
            .kv_heads = model_.kv_heads,
            .head_dim = dim,
            .window = phase.window,
            .splits = cuda::decode_splits(pass_.m, model_.heads, model_.kv_heads, dim, most, gpu::multiprocessors()),
            .scale = static_cast<float>(model_.attention_scale)};
  }

  PassModel model_;  ///< Keeps its tensors.
  at::Tensor numbers_;
  std::vector<PassPhase> phases_;
  std::vector<at::Tensor> held_;
  at::Tensor stream_;
  cuda::DecodePass pass_;
  int64_t ranks_, floats_ = 0, attention_floats_ = 0, columns_ = 0;
};

}  // namespace

std::unique_ptr<DecodePass> gpu::make_wide_pass(const PassModel& model, const at::Tensor& numbers) {
  PassWriter writer(model, numbers.size(1), at::TensorOptions().dtype(at::kBFloat16).device(numbers.device()));
  if (!writer.write()) return nullptr;
  auto made = std::make_unique<WidePass>(model, std::move(writer), numbers);
  return made->has_kernels() ? std::move(made) : nullptr;
}

}  // namespace qlorapp::ops
