// SPDX-License-Identifier: Apache-2.0
#include "io/linear_weight.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "format/double_quant.hpp"
#include "format/dynamic_map.hpp"
#include "format/model_folder.hpp"
#include "io/tensor_file.hpp"
#include "quant/arrival.hpp"

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
  QLORAPP_CHECK_FORMAT(scales.isfinite().all().item<bool>(),
                       "[load] {}: tensor '{}' must be finite; it holds inf or nan. The file is damaged; fetch it again.",
                       location.file->path(), location.tensor->name);
}

}  // namespace

format::TensorLocation find_checked(const format::TensorFiles& files, const std::string& name, const std::vector<int64_t>& shape) {
  const format::TensorLocation& location = files.at(name);
  QLORAPP_CHECK_FORMAT(location.tensor->shape == shape, "[load] {}: tensor '{}' must have shape {} by config.json; got {}.",
                       location.file->path(), name, joined(shape), joined(location.tensor->shape));
  const at::ScalarType dtype = scalar_type_of(location.tensor->dtype, name);
  QLORAPP_CHECK_FORMAT(at::isFloatingType(dtype) && c10::elementSize(dtype) >= 2,
                       "[load] {}: tensor '{}' must be float32, float16 or bfloat16; got {}.", location.file->path(), name,
                       format::dtype_name(location.tensor->dtype));
  return location;
}

WeightForm stored_form(const format::TensorFiles& files, const std::string& name, const std::vector<int64_t>& shape) {
  const format::QuantizedWeight found = format::find_quantized_weight(files, name);
  QLORAPP_CHECK_FORMAT(found.state.shape == shape,
                       "[load] {}: tensor '{}' must have shape {} by config.json; its quant_state says {}.",
                       found.packed.file->path(), name, joined(shape), joined(found.state.shape));
  return {
      shape, scalar_type_of(found.state.dtype, name),
      Quantizer::Options{found.state.quant_type, found.state.block_size, found.state.double_quant, found.state.nested_block_size}};
}

QuantizedTensor stream_quantized(std::vector<StreamedTensor>& tensors, const format::TensorFiles& files, const std::string& name,
                                 const std::vector<int64_t>& shape) {
  const WeightForm form = stored_form(files, name, shape);
  QuantizedTensor weight = empty_quantized(shape, form.dtype, *form.four_bit, at::kCPU);
  stream_quantized(tensors, files, name, weight, {});
  return weight;
}

void stream_quantized(std::vector<StreamedTensor>& tensors, const format::TensorFiles& files, const std::string& name,
                      const QuantizedTensor& weight, std::function<void()> done) {
  const format::QuantizedWeight found = format::find_quantized_weight(files, name);
  const std::string& path = found.packed.file->path();
  QLORAPP_CHECK_FORMAT(
      at::equal(read_tensor(found.quant_map), code_book(weight.quant_type)),
      "[load] {}: the code book of '{}' is not the standard one of its quant_type; the weight cannot be read exactly.", path, name);
  if (found.state.double_quant) {
    const at::Tensor nested_absmax = read_tensor(found.nested_absmax);
    check_finite(nested_absmax, found.nested_absmax);
    weight.nested_absmax.copy_(nested_absmax);
    weight.nested_offset.fill_(found.state.nested_offset);
    QLORAPP_CHECK_FORMAT(
        at::equal(read_tensor(found.nested_quant_map), nested_code_book()),
        "[load] {}: the nested code book of '{}' is not the standard dynamic map; the weight cannot be read exactly.", path, name);
  }
  weight.check(name);
  const auto both = std::make_shared<int>(2);
  const auto part = [both, done = std::move(done)] {
    if (--*both == 0 && done) done();
  };
  tensors.push_back({found.packed, weight.packed, {}, part});
  tensors.push_back({found.absmax, weight.absmax, {}, [part, scales = weight.absmax, location = found.absmax] {
                       if (scales.scalar_type() == at::kFloat) check_finite(scales, location);
                       part();
                     }});
}

void stream_and_quantize(std::vector<StreamedTensor>& tensors, const format::TensorFiles& files, const std::string& name,
                         const std::vector<int64_t>& shape, const Quantizer& quantizer, std::function<void(QuantizedTensor)> done) {
  const format::TensorLocation location = find_checked(files, name, shape);
  tensors.push_back(
      streamed(location, arrive_quantized(name, shape, scalar_type_of(location.tensor->dtype, name), quantizer, std::move(done))));
}

std::vector<std::pair<std::string, at::Tensor>> quantized_tensors(const std::string& name, const QuantizedTensor& weight) {
  QLORAPP_CHECK_VALUE(
      has_code_book(weight.quant_type),
      "[save] {} is in blocks of a GGUF file, for which a checkpoint has no form. Save the adapter alone, merge it, or have the "
      "weights quantized anew: quantization_config, at the command line --requantize nf4.",
      name);
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
  tensors.emplace_back(message("{}.quant_state.bitsandbytes__{}", name, format::bitsandbytes_name(weight.quant_type)),
                       bytes_tensor(format::quant_state_json(state)));
  return tensors;
}

QuantizedTensor quantized_of_tensors(const std::map<std::string, at::Tensor>& tensors, const std::string& name,
                                     const std::string& where) {
  const std::string prefix = name + ".quant_state.";
  std::vector<const at::Tensor*> states;
  for (const auto& [key, tensor] : tensors) {
    if (key.starts_with(prefix)) states.push_back(&tensor);
  }
  QLORAPP_CHECK_FORMAT(states.size() == 1,
                       "[load] {}: a four-bit weight must have one quant_state; it has {}. Quantize the model again.", where,
                       states.size());
  const at::Tensor blob = states[0]->cpu().contiguous();
  QLORAPP_CHECK_FORMAT(blob.scalar_type() == at::kByte && blob.dim() == 1,
                       "[load] {}: a quant_state must be uint8 with one dimension. Quantize the model again.", where);
  const format::QuantState state =
      format::parse_quant_state({static_cast<const char*>(blob.const_data_ptr()), static_cast<size_t>(blob.numel())}, where);
  const auto part = [&](const std::string& suffix, at::ScalarType dtype, int64_t elements) {
    const auto found = tensors.find(name + suffix);
    QLORAPP_CHECK_FORMAT(found != tensors.end() && found->second.scalar_type() == dtype && found->second.numel() == elements,
                         "[load] {}{} must exist as {} with {} elements, by the quant_state. Quantize the model again.", where,
                         suffix, at::toString(dtype), elements);
    return found->second.flatten();
  };
  const auto packed = tensors.find(name);
  QLORAPP_CHECK_FORMAT(packed != tensors.end() && static_cast<int64_t>(packed->second.nbytes()) == state.packed_bytes(),
                       "[load] {} must have {} bytes, by the shape of its quant_state {}; got {}. Quantize the model again.", where,
                       state.packed_bytes(), joined(state.shape),
                       packed == tensors.end() ? 0 : static_cast<int64_t>(packed->second.nbytes()));
  QuantizedTensor weight =
      empty_quantized(state.shape, scalar_type_of(state.dtype, where),
                      {state.quant_type, state.block_size, state.double_quant, state.nested_block_size}, packed->second.device());
  QLORAPP_CHECK_FORMAT(at::equal(part(".quant_map", at::kFloat, int64_t{16}).cpu(), code_book(weight.quant_type)),
                       "[load] {}: its code book is not the standard one of its quant_type; the weight cannot be read exactly.",
                       where);
  const at::Tensor absmax = part(".absmax", state.double_quant ? at::kByte : at::kFloat, state.block_count());
  at::Tensor scales = absmax;
  if (state.double_quant) {
    scales = part(".nested_absmax", at::kFloat, state.nested_block_count());
    weight.nested_absmax.copy_(scales.view_as(weight.nested_absmax));
    weight.nested_offset.fill_(state.nested_offset);
    QLORAPP_CHECK_FORMAT(at::equal(part(".nested_quant_map", at::kFloat, int64_t{256}).cpu(), nested_code_book()),
                         "[load] {}: its nested code book is not the standard dynamic map; the weight cannot be read exactly.",
                         where);
  }
  QLORAPP_CHECK_FORMAT(scales.isfinite().all().item<bool>(),
                       "[load] {}: its scales must be finite; they hold inf or nan. The file is damaged; fetch it again.", where);
  // bnb_4bit_quant_storage may show the same bytes as another dtype.
  weight.packed.copy_(packed->second.contiguous().flatten().view(at::kByte).view_as(weight.packed));
  weight.absmax.copy_(absmax.view_as(weight.absmax));
  weight.check(name);
  return weight;
}

WeightSource checkpoint_weights(std::string folder) {
  auto opened = std::make_shared<std::optional<format::ModelFolder>>();
  return [opened, folder = std::move(folder)](const std::string& module) -> at::Tensor {
    if (!*opened) opened->emplace(format::open_model_folder(folder));
    const format::TensorFiles& files = (*opened)->tensors;
    const std::string name = module + ".weight";
    if (format::is_quantized(files, name)) return {};
    return read_tensor(files.at(name));
  };
}

}  // namespace qlorapp
