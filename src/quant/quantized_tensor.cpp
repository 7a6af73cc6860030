// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/quant/quantized_tensor.hpp"

#include <ATen/ATen.h>

#include "core/check.hpp"

namespace qlorapp {
namespace {

/// One tensor of a weight against what shape and block sizes say.
void check_part(const std::string& name, const char* part, const at::Tensor& tensor, at::ScalarType dtype, int64_t numel,
                at::Device device) {
  QLORAPP_CHECK_VALUE(tensor.defined(), "[{}] {} is missing.", name, part);
  QLORAPP_CHECK_VALUE(tensor.scalar_type() == dtype, "[{}] {} must be {}; got {}.", name, part, at::toString(dtype),
                      at::toString(tensor.scalar_type()));
  QLORAPP_CHECK_VALUE(tensor.numel() == numel, "[{}] {} must hold {} elements; got {}.", name, part, numel, tensor.numel());
  QLORAPP_CHECK_VALUE(tensor.device() == device, "[{}] {} must be on {}, where packed is; got {}.", name, part, device.str(),
                      tensor.device().str());
}

}  // namespace

int64_t QuantizedTensor::numel() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

Bytes QuantizedTensor::nbytes() const {
  Bytes total;
  for (const at::Tensor& part : {packed, absmax, nested_absmax, nested_offset})
    if (part.defined()) total += Bytes{static_cast<int64_t>(part.nbytes())};
  return total;
}

QuantizedTensor QuantizedTensor::to(at::Device device) const {
  QuantizedTensor moved = *this;
  for (at::Tensor* part : {&moved.packed, &moved.absmax, &moved.nested_absmax, &moved.nested_offset})
    if (part->defined()) *part = part->to(device);
  return moved;
}

QuantizedTensor QuantizedTensor::clone() const {
  QuantizedTensor copied = *this;
  for (at::Tensor* part : {&copied.packed, &copied.absmax, &copied.nested_absmax, &copied.nested_offset})
    if (part->defined()) *part = part->clone();
  return copied;
}

void QuantizedTensor::check(const std::string& name) const {
  QLORAPP_CHECK_VALUE(is_block_size(block_size), "[{}] block_size must be one of {}; got {}.", name, joined(kBlockSizes),
                      block_size);
  QLORAPP_CHECK_VALUE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                      "[{}] dtype must be float32, float16 or bfloat16; got {}.", name, at::toString(dtype));
  int64_t n = 1;
  for (const int64_t size : shape) {
    QLORAPP_CHECK_VALUE(size >= 0 && !__builtin_mul_overflow(n, size, &n),
                        "[{}] shape must be of sizes >= 0 with a product below 2^63; got {}.", name, joined(shape));
  }
  QLORAPP_CHECK_VALUE(packed.defined(), "[{}] packed is missing.", name);
  const at::Device device = packed.device();
  QLORAPP_CHECK_VALUE(has_code_book(quant_type) || (!shape.empty() && shape.back() % block_elements(quant_type) == 0),
                      "[{}] rows must be whole blocks of {} elements; got shape {}.", name, block_size, joined(shape));
  check_part(name, "packed", packed, at::kByte, packed_bytes(quant_type, n), device);
  const int64_t blocks = scale_count(quant_type, n, block_size);
  check_part(name, "absmax", absmax, double_quantized() ? at::kByte : at::kFloat, blocks, device);
  QLORAPP_CHECK_VALUE(nested_absmax.defined() == nested_offset.defined(),
                      "[{}] nested_absmax and nested_offset come together; got one of them.", name);
  if (!double_quantized()) return;
  QLORAPP_CHECK_VALUE(nested_block_size > 0, "[{}] nested_block_size must be above 0; got {}.", name, nested_block_size);
  check_part(name, "nested_absmax", nested_absmax, at::kFloat, block_count(blocks, nested_block_size), device);
  check_part(name, "nested_offset", nested_offset, at::kFloat, 1, device);
}

}  // namespace qlorapp
