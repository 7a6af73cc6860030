// SPDX-License-Identifier: Apache-2.0
#include "format/quant_state.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "format/double_quant.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kStatePrefix = "quant_state.";
constexpr int64_t kMaxJsonBytes = 64 * 1024;
constexpr int64_t kCodeBookSize = 16, kDynamicMapSize = 256;
constexpr int64_t kLeastBlock = 32, kMostBlock = 4096;

std::string state_suffix(QuantType type) { return message("{}bitsandbytes__{}", kStatePrefix, bitsandbytes_name(type)); }

bool is_block_size(int64_t size) { return size >= kLeastBlock && size <= kMostBlock && (size & (size - 1)) == 0; }

/// Room for every product below: packed bytes, blocks, offsets in a file.
bool is_weight_shape(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    if (size < 1 || __builtin_mul_overflow(numel, size, &numel)) return false;
  }
  return !shape.empty() && shape.size() <= kMaxTensorRank && numel < (int64_t{1} << 56);
}

TensorLocation part(const TensorFiles& files, const std::string& name, Dtype dtype, int64_t count) {
  const TensorLocation& location = files.at(name);
  const TensorEntry& tensor = *location.tensor;
  QLORAPP_CHECK_FORMAT(
      tensor.dtype == dtype && tensor.shape == std::vector<int64_t>{count},
      "[{}] tensor {} must be {} [{}], by the shape and block size of its quant_state; got {} {}. Quantize the model again.",
      location.file->path(), printable(name), dtype_name(dtype), count, dtype_name(tensor.dtype), joined(tensor.shape));
  return location;
}

}  // namespace

int64_t QuantState::numel() const { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

std::string_view bitsandbytes_name(QuantType type) { return type == QuantType::kNf4 ? "nf4" : "fp4"; }

std::string quant_state_json(const QuantState& state) {
  QLORAPP_CHECK_VALUE(is_weight_shape(state.shape), "[quant_state] shape must be one or more sizes >= 1; got {}. Check the weight.",
                      joined(state.shape));
  QLORAPP_CHECK_VALUE(is_block_size(state.block_size) && is_block_size(state.nested_block_size),
                      "[quant_state] block sizes must be powers of two from 32 to 4096; got {} and {}. Use 64 and 256.",
                      state.block_size, state.nested_block_size);
  QLORAPP_CHECK_VALUE(std::isfinite(state.nested_offset),
                      "[quant_state] nested_offset must be finite; got {}. Check the weight for NaN and Inf.", state.nested_offset);
  Json json = Json::object();
  json["quant_type"] = bitsandbytes_name(state.quant_type);
  json["blocksize"] = state.block_size;
  json["dtype"] = torch_name(state.dtype);
  json["shape"] = state.shape;
  if (state.double_quant) {
    json["nested_blocksize"] = state.nested_block_size;
    json["nested_dtype"] = "float32";
    json["nested_offset"] = static_cast<double>(state.nested_offset);  // Tensor.item() widens, so repr shows a double's digits
  }
  return dump_python_json(json);
}

QuantState parse_quant_state(std::string_view text, std::string_view where) {
  const Json json = parse_json(text, where, {.max_bytes = static_cast<size_t>(kMaxJsonBytes), .max_depth = 2});
  JsonFields fields(json, std::string(where));
  QuantState state;
  const std::string type = fields.required_text("quant_type");
  if (type != "nf4" && type != "fp4") fields.fail("quant_type", "must be nf4 or fp4", Json(type));
  state.quant_type = type == "nf4" ? QuantType::kNf4 : QuantType::kFp4;
  const auto block_size = [&](std::string_view key) {
    const int64_t size = fields.required_integer(key, kLeastBlock, kMostBlock);
    if (!is_block_size(size)) fields.fail(key, "must be a power of two", Json(size));
    return size;
  };
  state.block_size = block_size("blocksize");
  const std::string dtype = fields.required_text("dtype");
  const auto weight_dtype = weight_dtype_from_torch_name(dtype);
  if (!weight_dtype) fields.fail("dtype", "must be float32, float16 or bfloat16", Json(dtype));
  state.dtype = *weight_dtype;
  const Json* shape = fields.value("shape");
  QLORAPP_CHECK_FORMAT(shape != nullptr, "[{}] shape is required; it is missing. Quantize the model again.", where);
  bool integers = shape->is_array();
  for (size_t i = 0; integers && i < shape->size(); ++i) integers = (*shape)[i].is_number_integer();
  if (integers) state.shape = shape->get<std::vector<int64_t>>();
  if (!integers || !is_weight_shape(state.shape))
    fields.fail("shape", "must be one or more integers >= 1", *shape, "Quantize the model again.");
  static constexpr std::array<std::string_view, 3> kNestedKeys{"nested_blocksize", "nested_dtype", "nested_offset"};
  state.double_quant =
      std::any_of(kNestedKeys.begin(), kNestedKeys.end(), [&](std::string_view key) { return fields.value(key) != nullptr; });
  if (state.double_quant) {
    state.nested_block_size = block_size("nested_blocksize");
    const std::string nested_dtype = fields.required_text("nested_dtype");
    if (nested_dtype != "float32") fields.fail("nested_dtype", "must be float32", Json(nested_dtype));
    state.nested_offset = static_cast<float>(fields.required_number("nested_offset"));
    if (!std::isfinite(state.nested_offset)) fields.fail("nested_offset", "must fit in a float32", json["nested_offset"]);
  }
  const auto unknown = fields.remaining();
  QLORAPP_CHECK_FORMAT(unknown.empty(), "[{}] unknown key {} in a quant_state. Quantize the model again.", where,
                       printable(unknown.front()));
  return state;
}

std::vector<TensorSpec> quantized_tensor_specs(const std::string& weight, const QuantState& state) {
  const auto json_bytes = static_cast<int64_t>(quant_state_json(state).size());
  std::vector<TensorSpec> specs{{weight, Dtype::kU8, {state.packed_bytes(), 1}},
                                {weight + ".absmax", state.double_quant ? Dtype::kU8 : Dtype::kF32, {state.block_count()}},
                                {weight + ".quant_map", Dtype::kF32, {kCodeBookSize}}};
  if (state.double_quant) {
    specs.push_back({weight + ".nested_absmax", Dtype::kF32, {state.nested_block_count()}});
    specs.push_back({weight + ".nested_quant_map", Dtype::kF32, {kDynamicMapSize}});
  }
  specs.push_back({weight + "." + state_suffix(state.quant_type), Dtype::kU8, {json_bytes}});
  return specs;
}

bool is_quantized(const TensorFiles& files, const std::string& weight) {
  return !files.with_prefix(message("{}.{}", weight, kStatePrefix)).empty();
}

QuantizedWeight find_quantized_weight(const TensorFiles& files, const std::string& weight) {
  const auto states = files.with_prefix(message("{}.{}", weight, kStatePrefix));
  QLORAPP_CHECK_FORMAT(states.size() == 1, "[{}] a four-bit weight must have one quant_state; {} has {}. Quantize the model again.",
                       files.folder(), printable(weight), states.size());
  const TensorEntry& blob = *states[0].tensor;
  const std::string where = message("{}: {}", states[0].file->path(), printable(blob.name));
  QLORAPP_CHECK_FORMAT(blob.dtype == Dtype::kU8 && blob.shape.size() == 1 && blob.nbytes <= kMaxJsonBytes,
                       "[{}] a quant_state must be U8 with one dimension of at most {}; got {} {}. Quantize the model again.",
                       where, kMaxJsonBytes, dtype_name(blob.dtype), joined(blob.shape));
  std::string json(static_cast<size_t>(blob.nbytes), '\0');
  states[0].file->read(blob, 0, std::as_writable_bytes(std::span(json)));
  QuantizedWeight found;
  found.state = parse_quant_state(json, where);
  const QuantState& state = found.state;
  QLORAPP_CHECK_FORMAT(blob.name == message("{}.{}", weight, state_suffix(state.quant_type)),
                       "[{}] its name must end in {}, because its quant_type is {}. Quantize the model again.", where,
                       state_suffix(state.quant_type), bitsandbytes_name(state.quant_type));

  // bnb_4bit_quant_storage may show the same bytes as another dtype, so the bytes count and not the elements.
  found.packed = files.at(weight);
  const TensorEntry& packed = *found.packed.tensor;
  QLORAPP_CHECK_FORMAT(packed.nbytes == state.packed_bytes(),
                       "[{}] tensor {} must have {} bytes, by the shape of its quant_state {}; got {}. Quantize the model again.",
                       found.packed.file->path(), printable(weight), state.packed_bytes(), joined(state.shape), packed.nbytes);
  found.absmax = part(files, weight + ".absmax", state.double_quant ? Dtype::kU8 : Dtype::kF32, state.block_count());
  found.quant_map = part(files, weight + ".quant_map", Dtype::kF32, kCodeBookSize);
  if (state.double_quant) {
    found.nested_absmax = part(files, weight + ".nested_absmax", Dtype::kF32, state.nested_block_count());
    found.nested_quant_map = part(files, weight + ".nested_quant_map", Dtype::kF32, kDynamicMapSize);
  }
  for (const TensorLocation& location : files.with_prefix(weight + ".")) {
    const TensorEntry* tensor = location.tensor;
    const bool known = tensor == &blob || tensor == found.absmax.tensor || tensor == found.quant_map.tensor ||
                       tensor == found.nested_absmax.tensor || tensor == found.nested_quant_map.tensor;
    QLORAPP_CHECK_FORMAT(known, "[{}] tensor {} must not exist beside a quant_state{}. Quantize the model again.",
                         location.file->path(), printable(tensor->name), state.double_quant ? "" : " without double quantization");
  }
  return found;
}

}  // namespace qlorapp::format
