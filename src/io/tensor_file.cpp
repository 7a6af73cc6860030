// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_file.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "core/check.hpp"

namespace qlorapp {
namespace {

using format::Dtype;

constexpr std::pair<Dtype, at::ScalarType> kTypes[] = {{Dtype::kBool, at::kBool},
                                                       {Dtype::kU8, at::kByte},
                                                       {Dtype::kI8, at::kChar},
                                                       {Dtype::kF8E5M2, at::kFloat8_e5m2},
                                                       {Dtype::kF8E4M3, at::kFloat8_e4m3fn},
                                                       {Dtype::kI16, at::kShort},
                                                       {Dtype::kU16, at::kUInt16},
                                                       {Dtype::kF16, at::kHalf},
                                                       {Dtype::kBF16, at::kBFloat16},
                                                       {Dtype::kI32, at::kInt},
                                                       {Dtype::kU32, at::kUInt32},
                                                       {Dtype::kF32, at::kFloat},
                                                       {Dtype::kC64, at::kComplexFloat},
                                                       {Dtype::kF64, at::kDouble},
                                                       {Dtype::kI64, at::kLong},
                                                       {Dtype::kU64, at::kUInt64}};

/// In pieces through pinned memory, which a GPU writes several times faster than pageable memory. @param pinned  kept between calls.
void write_from_gpu(format::SafetensorsWriter& writer, const at::Tensor& tensor, at::Tensor& pinned) {
  constexpr int64_t kPiece = int64_t{16} << 20;
  if (!pinned.defined()) pinned = at::empty({kPiece}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const at::Tensor all = at::from_blob(tensor.data_ptr(), {bytes}, tensor.options().dtype(at::kByte));
  for (int64_t at = 0; at < bytes; at += kPiece) {
    const int64_t size = std::min(kPiece, bytes - at);
    pinned.narrow(0, 0, size).copy_(all.narrow(0, at, size));
    writer.write(bytes_of(pinned).first(static_cast<size_t>(size)));
  }
}

}  // namespace

std::span<std::byte> bytes_of(const at::Tensor& tensor) { return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()}; }

at::ScalarType scalar_type_of(Dtype dtype, const std::string& tensor) {
  for (const auto& [ours, torchs] : kTypes) {
    if (ours == dtype) return torchs;
  }
  throw FormatError(message("[safetensors] tensor '{}' has dtype {}, which is not supported.", tensor, format::dtype_name(dtype)));
}

Dtype format_dtype_of(at::ScalarType type) {
  for (const auto& [ours, torchs] : kTypes) {
    if (torchs == type) return ours;
  }
  throw TypeError(message("[safetensors] a tensor of type {} cannot be written.", c10::toString(type)));
}

at::Tensor read_tensor(const format::TensorSource& file, const format::TensorEntry& entry) {
  at::Tensor tensor = at::empty(entry.shape, at::TensorOptions().dtype(scalar_type_of(entry.dtype, entry.name)));
  if (tensor.numel() > 0) file.read(entry, 0, bytes_of(tensor));
  return tensor;
}

NamedTensors read_tensors(const std::string& path) {
  const format::SafetensorsFile file(path);
  NamedTensors tensors;
  for (const format::TensorEntry& entry : file.tensors()) tensors.emplace_back(entry.name, read_tensor(file, entry));
  return tensors;
}

void write_tensors(const std::string& path, const NamedTensors& tensors, const format::Metadata& metadata) {
  std::vector<format::TensorSpec> specs;
  std::map<std::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : tensors) {
    specs.push_back({name, format_dtype_of(tensor.scalar_type()), tensor.sizes().vec()});
    by_name[name] = &tensor;
  }
  format::SafetensorsWriter writer(path, std::move(specs), metadata);
  at::Tensor pinned;
  for (const format::TensorEntry& entry : writer.tensors()) {
    const at::Tensor plain = by_name.at(entry.name)->detach().contiguous();
    if (plain.numel() == 0) continue;
    if (plain.is_cuda()) write_from_gpu(writer, plain, pinned);
    else writer.write(bytes_of(plain.cpu()));
  }
  writer.finish();
}

}  // namespace qlorapp
