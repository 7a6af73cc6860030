// SPDX-License-Identifier: Apache-2.0
#include "ops/decode_pass.hpp"

#include <atomic>

namespace qlorapp::ops {
namespace {

constinit std::atomic<detail::PassMaker> maker_of_gpu{nullptr};  // set by another file's static initializer

}  // namespace

std::unique_ptr<DecodePass> make_decode_pass(const PassModel& model, const at::Tensor& numbers) {
  const detail::PassMaker maker = maker_of_gpu.load();
  return maker != nullptr && numbers.is_cuda() ? maker(model, numbers) : nullptr;
}

namespace detail {

void set_pass_maker(PassMaker maker) { maker_of_gpu = maker; }

}  // namespace detail
}  // namespace qlorapp::ops
