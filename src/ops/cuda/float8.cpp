// SPDX-License-Identifier: Apache-2.0
#include "cuda/float8.hpp"

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_scaled_mm.h>
#include <torch/library.h>

#include "../float8_shapes.hpp"
#include "dequantize.hpp"
#include "launch.hpp"
#include "ops/float8.hpp"

namespace qlorapp::ops {
namespace {

static_assert(kFloat8WeightStep == cuda::kFloat8Step);
static_assert(static_cast<float>(kSmallestFloat8Row) == cuda::kSmallestFloat8Row);

at::Tensor dequantize_cuda(at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax, at::TensorList nested_offset,
                           at::IntArrayRef rows, int64_t columns, int64_t block_size, int64_t nested_block_size,
                           std::string_view quant_type, const at::Tensor& weight_scale, bool transpose) {
  const FourBitStack stack{packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type};
  const int64_t height = check_float8_weights(stack, columns, weight_scale);
  TORCH_CHECK_VALUE(stack.size() <= cuda::kMaxFourBitSegments, "[dequantize_4bit_float8] accepts up to ", cuda::kMaxFourBitSegments,
                    " weights at a time; got ", stack.size(), ".");
  const gpu::Launch launch(weight_scale);
  at::Tensor out =
      at::empty({transpose ? columns : height, transpose ? height : columns}, weight_scale.options().dtype(at::kFloat8_e4m3fn));
  cuda::DequantizeToFloat8 work;
  std::vector<gpu::FourBitMemory> memory;
  memory.reserve(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    const FourBitStack::Entry entry = stack.entry(i, columns);
    memory.push_back(gpu::four_bit_memory(entry.arguments(stack)));
    cuda::FourBitSegment& segment = work.segments[work.segment_count++];
    segment = memory.back().segment;
    segment.rows = rows[i];
    segment.first_row = work.rows;
    work.rows += rows[i];
  }
  work.columns = columns;
  work.block_size = block_size;
  work.nested_block_size = nested_block_size;
  work.quant_type = checked_code_book("dequantize_4bit_float8", quant_type);
  work.weight_scale = weight_scale.const_data_ptr<float>();
  work.transpose = transpose;
  work.out = out.mutable_data_ptr();
  C10_CUDA_CHECK(cuda::dequantize_to_float8(work, launch.stream()));
  return out;
}

std::tuple<at::Tensor, at::Tensor> quantize_rows_cuda(const at::Tensor& x, const std::optional<at::Tensor>& weight_scale) {
  check_float8_rows(x, weight_scale);
  const gpu::Launch launch(x);
  at::Tensor values = at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn));
  at::Tensor scale = at::empty({x.size(0), 1}, x.options().dtype(at::kFloat));
  cuda::QuantizeRowsToFloat8 work;
  work.x = x.const_data_ptr();
  work.type = gpu::float_type("quantize_rows_float8", x);
  work.rows = x.size(0);
  work.columns = x.size(1);
  work.row_stride = x.stride(0);
  work.weight_scale = gpu::device_number(weight_scale);
  work.values = values.mutable_data_ptr();
  work.scale = scale.mutable_data_ptr<float>();
  C10_CUDA_CHECK(cuda::quantize_rows_to_float8(work, launch.stream()));
  return {std::move(values), std::move(scale)};
}

void product_cuda(at::Tensor& y, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& w, const at::Tensor& ones) {
  check_float8_product(y, x, scale, w, ones);
  const gpu::Launch launch(y);
  const cudaDeviceProp* const device = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK_VALUE(
      device->major * 10 + device->minor >= 89,
      "[float8_product_out] needs a GPU that multiplies eight bits: sm_89 (L4, RTX 40), sm_90 (H100) or newer; this one is "
      "sm_",
      device->major, device->minor, ". Leave fp8 out.");
  // Sums stay in the tensor cores between additions (fast accumulation), as every eight-bit training recipe has it for speed.
  at::_scaled_mm_out(y, x, w.t(), scale.view({-1, 1}), ones.flatten().narrow(0, 0, w.size(0)).view({1, -1}), /*bias=*/{},
                     /*scale_result=*/{}, y.scalar_type(), /*use_fast_accum=*/true);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("dequantize_4bit_float8", dequantize_cuda);
  m.impl("quantize_rows_float8", quantize_rows_cuda);
  m.impl("float8_product_out", product_cuda);
}

}  // namespace qlorapp::ops
