// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../quantize_arguments.hpp"
#include "cuda/gemm_4bit_group.hpp"
#include "dequantize.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

constexpr const char* kGroup = "linear_4bit_group_";

bool lies_at(const void* address, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

bool has_linear_4bit_group(at::ScalarType dtype, int64_t rows, int64_t columns, int64_t block_size, int64_t nested_block_size,
                           int64_t device) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) return false;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device < 0 ? c10::cuda::current_device() : device));
  const cuda::Float type = dtype == at::kHalf ? cuda::Float::kFloat16 : cuda::Float::kBFloat16;
  const cudaDeviceProp& device_has = *at::cuda::getCurrentDeviceProperties();
  return cuda::has_gemm_4bit_group(rows, columns, block_size, nested_block_size, type, gpu::code_architecture(),
                                   static_cast<int64_t>(device_has.sharedMemPerBlockOptin),
                                   static_cast<int64_t>(device_has.reservedSharedMemPerBlock));
}

/// Two zeros that the launches of the current stream leave as they found them.
at::Tensor counters_of(at::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceIndex, c10::StreamId>, at::Tensor> all;
  const std::lock_guard lock(mutex);
  at::Tensor& own = all[{device.index(), at::cuda::getCurrentCUDAStream(device.index()).id()}];
  if (!own.defined()) own = at::zeros({2}, at::TensorOptions().dtype(at::kInt).device(device));
  return own;
}

void linear_4bit_group(at::Tensor& y, const at::Tensor& x, at::TensorList packed, at::TensorList absmax,
                       at::TensorList nested_absmax, at::TensorList nested_offset, at::IntArrayRef heights, int64_t block_size,
                       int64_t nested_block_size, std::string_view quant_type, const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& a, at::TensorList b, at::ArrayRef<double> scaling) {
  const size_t count = packed.size();
  TORCH_CHECK_VALUE(x.dim() == 2 && y.dim() == 2 && x.stride(1) == 1 && y.stride(1) == 1 && y.size(0) == x.size(0) &&
                        y.scalar_type() == x.scalar_type() && x.stride(0) % 8 == 0 && lies_at(x.const_data_ptr(), 16),
                    "[", kGroup, "] x and y must be matrices of as many rows and one dtype, those of x at 16 bytes; got ",
                    x.sizes(), " and ", y.sizes(), ".");
  TORCH_CHECK_VALUE(
      count >= 1 && count <= cuda::GemmFourBitGroup::kMostWeights && absmax.size() == count && heights.size() == count &&
          b.size() == count && scaling.size() == count && (nested_absmax.empty() || nested_absmax.size() == count),
      "[", kGroup, "] there must be 1 to ", cuda::GemmFourBitGroup::kMostWeights, " weights, with one entry of each list.");
  TORCH_CHECK_VALUE(has_linear_4bit_group(x.scalar_type(), x.size(0), x.size(1), block_size, nested_block_size, x.device().index()),
                    "[", kGroup, "] has no kernel for x ", x.scalar_type(), " ", x.sizes(),
                    " on this GPU. Ask has_linear_4bit_group.");
  const gpu::Launch launch(x);
  cuda::GemmFourBitGroup work{.x = x.const_data_ptr(),
                              .x_stride = x.stride(0),
                              .y = y.mutable_data_ptr(),
                              .y_stride = y.stride(0),
                              .type = gpu::float_type(kGroup, x),
                              .m = x.size(0),
                              .k = x.size(1),
                              .weights = {},
                              .count = static_cast<int>(count),
                              .a = nullptr,
                              .u = nullptr,
                              .ranks = 0,
                              .counters = nullptr,
                              .bias = nullptr,
                              .nested_block_size = nested_block_size,
                              .quant_type = checked_code_book(kGroup, quant_type),
                              .partial = nullptr};
  int64_t rank = 0, rows = 0;
  std::vector<gpu::FourBitMemory> memories;
  for (size_t i = 0; i < count; ++i) {
    const std::optional<at::Tensor> nested = nested_absmax.empty() ? std::nullopt : std::optional(nested_absmax[i]);
    const std::optional<at::Tensor> offset = nested_absmax.empty() ? std::nullopt : std::optional(nested_offset[i]);
    const std::array<int64_t, 2> shape{heights[i], x.size(1)};
    const gpu::FourBitMemory& memory = memories.emplace_back(
        gpu::four_bit_memory({packed[i], absmax[i], nested, offset, shape, block_size, nested_block_size, quant_type}));
    cuda::GroupWeight& weight = work.weights[i];
    weight.packed = memory.segment.packed;
    weight.absmax = memory.segment.absmax;
    weight.nested_absmax = memory.segment.nested_absmax;
    weight.nested_offset = memory.segment.nested_offset;
    weight.n = heights[i];
    TORCH_CHECK_VALUE(lies_at(weight.packed, 16) && lies_at(weight.absmax, 16), "[", kGroup, "] weight ", i,
                      " must lie at 16 bytes.");
    TORCH_CHECK_VALUE(
        b[i].dim() == 2 && b[i].size(0) == heights[i] && b[i].is_contiguous() && b[i].scalar_type() == x.scalar_type(), "[", kGroup,
        "] b must be contiguous (", heights[i], ", rank) in the dtype of x; got ", b[i].scalar_type(), " ", b[i].sizes(), ".");
    weight.rank = b[i].size(1);
    weight.b = weight.rank == 0 ? nullptr : b[i].const_data_ptr();
    weight.u_column = rank;
    weight.scaling = static_cast<float>(scaling[i]);
    rank += weight.rank;
    rows += heights[i];
  }
  TORCH_CHECK_VALUE(y.size(1) == rows, "[", kGroup, "] y must have ", rows, " columns; got ", y.sizes(), ".");
  at::Tensor u;
  if (rank > 0) {
    TORCH_CHECK_VALUE(a.has_value() && a->dim() == 2 && a->size(0) == rank && a->size(1) == x.size(1) && a->is_contiguous() &&
                          a->scalar_type() == x.scalar_type() && lies_at(a->const_data_ptr(), 16),
                      "[", kGroup, "] a must be contiguous (", rank, ", ", x.size(1), ") in the dtype of x, at 16 bytes.");
    if (cuda::forms_u(work)) {
      u = at::empty({x.size(0), rank}, x.options());
      work.a = a->const_data_ptr();
      work.counters = reinterpret_cast<unsigned*>(counters_of(x.device()).mutable_data_ptr<int32_t>());
    } else {
      u = at::mm(x, a->t());
    }
    work.u = u.mutable_data_ptr();
    work.ranks = rank;
  }
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK_VALUE(bias->numel() == rows && bias->is_contiguous() && bias->scalar_type() == x.scalar_type(), "[", kGroup,
                      "] bias must be (", rows, ") in the dtype of x; got ", bias->sizes(), ".");
    work.bias = bias->const_data_ptr();
  }
  const int multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const at::Tensor partial = at::empty({cuda::gemm_4bit_group_floats(work, multiprocessors)}, x.options().dtype(at::kFloat));
  work.partial = partial.mutable_data_ptr<float>();
  C10_CUDA_CHECK(cuda::gemm_4bit_group(work, multiprocessors, launch.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CompositeExplicitAutograd, m) { m.impl("has_linear_4bit_group", has_linear_4bit_group); }
TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { m.impl("linear_4bit_group_", linear_4bit_group); }

}  // namespace qlorapp::ops
