// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/linear_weight.hpp"

#include <ATen/ATen.h>

#include <cstring>

#include "qlorapp/core/check.hpp"
#include "qlorapp/format/dynamic_map.hpp"
#include "qlorapp/io/tensor_file.hpp"

namespace qlorapp {
namespace {

at::Tensor code_book(QuantType type) {
  const auto& table = code_book_of(type);
  return at::tensor(at::ArrayRef<float>(table.data(), table.size()), at::TensorOptions().dtype(at::kFloat));
}

at::Tensor nested_code_book() {
  const auto table = signed_dynamic_map();
  return at::tensor(at::ArrayRef<float>(table.data(), table.size()), at::TensorOptions().dtype(at::kFloat));
}

at::Tensor bytes_tensor(std::string_view text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

void check_finite(const at::Tensor& scales, const format::TensorLocation& location) {
  QLORAPP_CHECK_FORMAT(scales.isfinite().all().item<bool>(), "[load] ", location.file->path(), ": tensor '", location.tensor->name,
                       "' must be finite; it holds inf or nan. The file is damaged; fetch it again.");
}

}  // namespace

at::Tensor read_checked(const format::Checkpoint& checkpoint, const std::string& name, const std::vector<int64_t>& shape) {
  const format::TensorLocation& location = checkpoint.at(name);
  QLORAPP_CHECK_FORMAT(location.tensor->shape == shape, "[load] ", location.file->path(), ": tensor '", name, "' must have shape ",
                       shape, " by config.json; got ", location.tensor->shape, ".");
  at::Tensor tensor = read_tensor(location);
  QLORAPP_CHECK_FORMAT(at::isFloatingType(tensor.scalar_type()) && tensor.element_size() >= 2, "[load] ", location.file->path(),
                       ": tensor '", name, "' must be float32, float16 or bfloat16; got ",
                       format::dtype_name(location.tensor->dtype), ".");
  return tensor;
}

QuantizedTensor read_quantized(const format::Checkpoint& checkpoint, const std::string& name, const std::vector<int64_t>& shape) {
  const format::QuantizedWeight found = format::find_quantized_weight(checkpoint, name);
  const std::string& path = found.packed.file->path();
  QLORAPP_CHECK_FORMAT(found.state.shape == shape, "[load] ", path, ": tensor '", name, "' must have shape ", shape,
                       " by config.json; its quant_state says ", found.state.shape, ".");
  QuantizedTensor weight;
  weight.shape = shape;
  weight.dtype = scalar_type_of(found.state.dtype, name);
  weight.block_size = found.state.block_size;
  weight.nested_block_size = found.state.nested_block_size;
  weight.quant_type = found.state.quant_type;
  weight.packed = read_tensor(found.packed).view(at::kByte).reshape({-1, 1});
  weight.absmax = read_tensor(found.absmax);
  QLORAPP_CHECK_FORMAT(at::equal(read_tensor(found.quant_map), code_book(weight.quant_type)), "[load] ", path,
                       ": the code book of '", name,
                       "' is not the standard one of its quant_type; the weight cannot be read exactly.");
  if (found.state.double_quant) {
    weight.nested_absmax = read_tensor(found.nested_absmax);
    check_finite(weight.nested_absmax, found.nested_absmax);
    weight.nested_offset = at::scalar_tensor(found.state.nested_offset, at::TensorOptions().dtype(at::kFloat));
    QLORAPP_CHECK_FORMAT(at::equal(read_tensor(found.nested_quant_map), nested_code_book()), "[load] ", path,
                         ": the nested code book of '", name,
                         "' is not the standard dynamic map; the weight cannot be read exactly.");
  } else {
    check_finite(weight.absmax, found.absmax);
  }
  weight.check(name);
  return weight;
}

QuantizedTensor quantize_named(const Quantizer& quantizer, const at::Tensor& weight, const std::string& name) {
  try {
    return quantizer.quantize(weight);
  } catch (const c10::Error& error) {  // an operator's refusal; its what() would end in a backtrace
    throw FormatError(concat("[load] tensor '", name, "' cannot be quantized: ", error.what_without_backtrace()));
  }
}

std::vector<std::pair<std::string, at::Tensor>> quantized_tensors(const std::string& name, const QuantizedTensor& weight) {
  format::QuantState state;
  state.quant_type = weight.quant_type;
  state.block_size = weight.block_size;
  state.dtype = format_dtype_of(weight.dtype);
  state.shape = weight.shape;
  state.double_quant = weight.double_quantized();
  state.nested_block_size = weight.nested_block_size;
  std::vector<std::pair<std::string, at::Tensor>> tensors{
      {name, weight.packed}, {name + ".absmax", weight.absmax}, {name + ".quant_map", code_book(weight.quant_type)}};
  if (state.double_quant) {
    state.nested_offset = weight.nested_offset.item<float>();
    tensors.emplace_back(name + ".nested_absmax", weight.nested_absmax);
    tensors.emplace_back(name + ".nested_quant_map", nested_code_book());
  }
  tensors.emplace_back(concat(name, ".quant_state.bitsandbytes__", format::bitsandbytes_name(weight.quant_type)),
                       bytes_tensor(format::quant_state_json(state)));
  return tensors;
}

bool names_module(const std::vector<std::string>& names, const std::string& module) {
  for (const std::string& name : names) {
    if (module == name || module.ends_with("." + name)) return true;
  }
  return false;
}

}  // namespace qlorapp
