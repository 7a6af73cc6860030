// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/quant/quantized_tensor.hpp"

#include <ATen/ATen.h>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

/// One tensor of a weight against what shape and block sizes say.
void check_part(const std::string& name, const char* part, const at::Tensor& tensor, at::ScalarType dtype, int64_t numel,
                at::Device device) {
  QLORAPP_CHECK_VALUE(tensor.defined(), "[", name, "] ", part, " is missing.");
  QLORAPP_CHECK_VALUE(tensor.scalar_type() == dtype, "[", name, "] ", part, " must be ", at::toString(dtype), "; got ",
                      at::toString(tensor.scalar_type()), ".");
  QLORAPP_CHECK_VALUE(tensor.numel() == numel, "[", name, "] ", part, " must hold ", numel, " elements; got ", tensor.numel(), ".");
  QLORAPP_CHECK_VALUE(tensor.device() == device, "[", name, "] ", part, " must be on ", device.str(), ", where packed is; got ",
                      tensor.device().str(), ".");
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
  QLORAPP_CHECK_VALUE(is_block_size(block_size), "[", name, "] block_size must be one of ", kBlockSizes, "; got ", block_size, ".");
  QLORAPP_CHECK_VALUE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "[", name,
                      "] dtype must be float32, float16 or bfloat16; got ", at::toString(dtype), ".");
  int64_t n = 1;
  for (const int64_t size : shape) {
    QLORAPP_CHECK_VALUE(size >= 0 && !__builtin_mul_overflow(n, size, &n), "[", name,
                        "] shape must be of sizes >= 0 with a product below 2^63; got ", shape, ".");
  }
  QLORAPP_CHECK_VALUE(packed.defined(), "[", name, "] packed is missing.");
  const at::Device device = packed.device();
  check_part(name, "packed", packed, at::kByte, packed_bytes(n), device);
  const int64_t blocks = block_count(n, block_size);
  check_part(name, "absmax", absmax, double_quantized() ? at::kByte : at::kFloat, blocks, device);
  QLORAPP_CHECK_VALUE(nested_absmax.defined() == nested_offset.defined(), "[", name,
                      "] nested_absmax and nested_offset come together; got one of them.");
  if (!double_quantized()) return;
  QLORAPP_CHECK_VALUE(nested_block_size > 0, "[", name, "] nested_block_size must be above 0; got ", nested_block_size, ".");
  check_part(name, "nested_absmax", nested_absmax, at::kFloat, block_count(blocks, nested_block_size), device);
  check_part(name, "nested_offset", nested_offset, at::kFloat, 1, device);
}

}  // namespace qlorapp
