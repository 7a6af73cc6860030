// SPDX-License-Identifier: Apache-2.0
#include "cuda/wide_pass.hpp"

#include <utility>

#include <ATen/ops/empty.h>

#include "launch.hpp"
#include "pass_writer.hpp"

namespace qlorapp::ops {
namespace {

class WidePass final : public DecodePass {
 public:
  WidePass(PassModel model, gpu::PassWriter writer, const at::Tensor& numbers)
      : model_(std::move(model)),
        numbers_(numbers),
        phases_(std::move(writer.phases)),
        held_(std::move(writer.held)),
        stream_(std::move(writer.stream)),
        ranks_(writer.most_ranks),
        work_({.pass = gpu::described(model_, numbers_), .phases = phases_, .longest = model_.capacity}),
        floats_(cuda::wide_pass_floats(work_, gpu::multiprocessors())),
        bytes_(cuda::wide_pass_bytes(work_)) {}

  [[nodiscard]] bool has_kernels() const { return cuda::has_wide_pass(work_); }

  /// Sums of parts, u and what is laid down are allocated for the time of a pass: a recording has them in memory that it shares with other work.
  at::Tensor run(const at::Tensor& x) override {
    const gpu::Launch launch(x);
    stream_.copy_(x);
    const at::TensorOptions options = stream_.options();
    const at::Tensor partial = at::empty({floats_}, options.dtype(at::kFloat));
    const at::Tensor laid = at::empty({bytes_}, options.dtype(at::kByte));
    const at::Tensor u = at::empty({numbers_.size(1), ranks_}, options);
    work_.pass.u = u.mutable_data_ptr();
    work_.partial = partial.mutable_data_ptr<float>();
    work_.laid = laid.mutable_data_ptr<uint8_t>();
    C10_CUDA_CHECK(cuda::wide_pass(work_, gpu::multiprocessors(), launch.stream()));
    return stream_;
  }

 private:
  PassModel model_;  ///< Keeps its tensors.
  at::Tensor numbers_;
  std::vector<cuda::PassPhase> phases_;
  std::vector<at::Tensor> held_;
  at::Tensor stream_;
  int64_t ranks_;
  cuda::WidePass work_;
  int64_t floats_, bytes_;  ///< Of what is allocated for a pass.
};

}  // namespace

std::unique_ptr<DecodePass> gpu::make_wide_pass(const PassModel& model, const at::Tensor& numbers) {
  constexpr int64_t kMostRows = 128;
  if (numbers.size(1) > kMostRows || gpu::code_architecture() < 90) return nullptr;
  PassWriter writer(model, numbers.size(1), at::TensorOptions().dtype(at::kBFloat16).device(numbers.device()));
  if (!writer.write()) return nullptr;
  auto made = std::make_unique<WidePass>(model, std::move(writer), numbers);
  return made->has_kernels() ? std::move(made) : nullptr;
}

}  // namespace qlorapp::ops
