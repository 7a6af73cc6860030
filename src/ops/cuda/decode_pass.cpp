// SPDX-License-Identifier: Apache-2.0
#include "ops/decode_pass.hpp"

#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "cuda/decode_pass.hpp"
#include "launch.hpp"
#include "pass_writer.hpp"

namespace qlorapp::ops {
namespace {

using cuda::PassPhase;
using gpu::multiprocessors;

class Pass final : public DecodePass {
 public:
  Pass(PassModel model, gpu::PassWriter writer, const at::Tensor& numbers)
      : model_(std::move(model)), numbers_(numbers), held_(std::move(writer.held)), stream_(writer.stream) {
    const auto bytes = static_cast<int64_t>(writer.phases.size() * sizeof(PassPhase));
    const at::Tensor host = at::empty({bytes}, at::kByte);
    std::memcpy(host.mutable_data_ptr(), writer.phases.data(), static_cast<size_t>(bytes));
    phases_ = host.to(numbers.device());
    pass_ = gpu::described(model_, numbers);
    pass_.phases = static_cast<const PassPhase*>(phases_.const_data_ptr());
    pass_.count = static_cast<int>(writer.phases.size());
    const at::TensorOptions options = stream_.options();
    u_ = at::empty({numbers.size(1), writer.most_ranks}, options);
    partial_ = at::empty({cuda::pass_partial_floats(pass_, multiprocessors())}, options.dtype(at::kFloat));
    counters_ = at::zeros({cuda::pass_counters(pass_)}, options.dtype(at::kInt));
    pass_.u = u_.mutable_data_ptr();
    pass_.partial = partial_.mutable_data_ptr<float>();
    pass_.counters = reinterpret_cast<unsigned*>(counters_.mutable_data_ptr<int32_t>());
  }

  at::Tensor run(const at::Tensor& x) override {
    const gpu::Launch launch(x);
    stream_.copy_(x);
    C10_CUDA_CHECK(cuda::decode_pass(pass_, multiprocessors(), launch.stream()));
    return stream_;
  }

 private:
  PassModel model_;  ///< Keeps its tensors.
  at::Tensor numbers_;
  std::vector<at::Tensor> held_;
  at::Tensor stream_, phases_, u_, partial_, counters_;
  cuda::DecodePass pass_;
};

std::unique_ptr<DecodePass> make(const PassModel& model, const at::Tensor& numbers) {
  const gpu::Launch launch(numbers);
  if (model.blocks.empty() || !has_code_book(model.quant_type) || model.block_size != 64 || model.nested_block_size % 4 != 0)
    return nullptr;
  constexpr int64_t kMostOfOneLaunch = 8;
  if (numbers.size(1) > kMostOfOneLaunch) return gpu::make_wide_pass(model, numbers);
  if (!cuda::has_decode_pass(cuda::Float::kBFloat16, numbers.size(1), model.head_dim, gpu::code_architecture(), multiprocessors()))
    return nullptr;
  gpu::PassWriter writer(model, numbers.size(1), at::TensorOptions().dtype(at::kBFloat16).device(numbers.device()));
  if (!writer.write()) return nullptr;
  return std::make_unique<Pass>(model, std::move(writer), numbers);
}

[[maybe_unused]] const bool maker_registered = (detail::set_pass_maker(make), true);

}  // namespace
}  // namespace qlorapp::ops
