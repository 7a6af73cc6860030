// SPDX-License-Identifier: Apache-2.0
/// Numbers between host and device that a GPU's queue need not be empty for.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace qlorapp {

/// (n) on the device, in the order of its current stream. Does not synchronize: pinned memory in between.
template <class Number>
at::Tensor on_device(const std::vector<Number>& values, at::Device device) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<Number>::value).pinned_memory(device.is_cuda());
  const at::Tensor host = at::empty({std::ssize(values)}, options);
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<Number>());
  return host.to(device, /*non_blocking=*/true);
}

/// Integers on their way to the host.
class ArrivingValues {
 public:
  ArrivingValues() = default;
  /// @param values  (n) int64 on a device. Does not synchronize.
  explicit ArrivingValues(const at::Tensor& values)
      : host_(at::empty(values.sizes(), at::TensorOptions().dtype(at::kLong).pinned_memory(values.is_cuda()))) {
    host_.copy_(values, /*non_blocking=*/true);
    if (!values.is_cuda()) return;
    arrived_.emplace(values.device().type());
    arrived_->record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
  }
  /// Waits for them, and for nothing that was launched behind them.
  [[nodiscard]] std::vector<int64_t> read() const {
    if (arrived_) arrived_->synchronize();
    const auto* const values = host_.const_data_ptr<int64_t>();
    return {values, values + host_.numel()};
  }

 private:
  at::Tensor host_;
  std::optional<c10::Event> arrived_;
};

}  // namespace qlorapp
