// SPDX-License-Identifier: Apache-2.0
#include "format/safetensors.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "core/printable.hpp"
#include "json/python_json.hpp"
#include "safetensors_header.hpp"

namespace qlorapp::format {
namespace {

constexpr int64_t kLengthBytes = 8;

std::string make_header(const std::vector<TensorEntry>& tensors, const Metadata& metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (json.back() != '{') json += ',';
      append_json_string(json, key, false);
      json += ':';
      append_json_string(json, value, false);
    }
    json += '}';
  }
  int64_t begin = 0;
  for (const TensorEntry& tensor : tensors) {
    if (json.size() > 1) json += ',';
    append_json_string(json, tensor.name, false);
    json += message(":{{\"dtype\":\"{}\",\"shape\":[", dtype_name(tensor.dtype));
    for (size_t i = 0; i < tensor.shape.size(); ++i) json += message("{}{}", i == 0 ? "" : ",", tensor.shape[i]);
    json += message("],\"data_offsets\":[{},{}]}}", begin, begin + tensor.nbytes);
    begin += tensor.nbytes;
  }
  json += '}';
  json.append((kLengthBytes - json.size() % kLengthBytes) % kLengthBytes, ' ');  // the data starts at a multiple of 8
  return json;
}

/// In the reference writer's order, with sizes; offsets come when the header's length is known.
std::vector<TensorEntry> laid_out(std::vector<TensorSpec>&& specs) {
  std::sort(specs.begin(), specs.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name; });
  std::vector<TensorEntry> tensors;
  tensors.reserve(specs.size());
  QLORAPP_CHECK_VALUE(specs.size() <= kMaxTensors, "[safetensors] a file may hold at most {} tensors; got {}. Write several files.",
                      kMaxTensors, specs.size());
  for (TensorSpec& spec : specs) {
    QLORAPP_CHECK_VALUE(spec.name != "__metadata__" && spec.name.size() <= kMaxTensorNameBytes,
                        "[safetensors] a name must have at most {} bytes and must not be __metadata__; got {}. Rename the tensor.",
                        kMaxTensorNameBytes, printable(spec.name));
    QLORAPP_CHECK_VALUE(
        spec.shape.size() <= kMaxTensorRank && std::all_of(spec.shape.begin(), spec.shape.end(), [](int64_t n) { return n >= 0; }),
        "[safetensors] a shape must have at most {} sizes >= 0; tensor {} has {}. Check the tensor.", kMaxTensorRank,
        printable(spec.name), joined(spec.shape));
    TensorEntry& tensor = tensors.emplace_back();
    bool misaligned = false;
    QLORAPP_CHECK_VALUE(tensor_bytes(spec.dtype, spec.shape, tensor.nbytes, misaligned),
                        "[safetensors] a tensor must be a whole number of bytes below 2^63; {} is {} {}. Check its shape.",
                        printable(spec.name), dtype_name(spec.dtype), joined(spec.shape));
    tensor.name = std::move(spec.name);
    tensor.dtype = spec.dtype;
    tensor.shape = std::move(spec.shape);
  }
  std::vector<std::string_view> names;
  for (const TensorEntry& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  QLORAPP_CHECK_VALUE(twice == names.end(), "[safetensors] names must be unique; got {} twice. Rename one.", printable(*twice));
  return tensors;
}

int64_t checked_total(const std::vector<TensorEntry>& tensors) {
  int64_t total = 0;
  for (const TensorEntry& tensor : tensors) {
    QLORAPP_CHECK_VALUE(!__builtin_add_overflow(total, tensor.nbytes, &total),
                        "[safetensors] a file must have less than 2^63 bytes; these tensors have more. Check their shapes.");
  }
  return total;
}

}  // namespace

int64_t TensorEntry::numel() const { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

SafetensorsFile::SafetensorsFile(const std::string& path) : SafetensorsFile(files::FileReader(path)) {}

SafetensorsFile::SafetensorsFile(files::FileReader reader) : reader_(std::move(reader)) {
  const std::string& where = reader_.path();
  const int64_t size = reader_.size();
  QLORAPP_CHECK_FORMAT(
      size >= kLengthBytes,
      "[{}] header too small: a safetensors file has at least 8 bytes; got {}. It is truncated or of another kind.", where, size);
  std::array<std::byte, kLengthBytes> prefix{};
  reader_.read_at(0, prefix);
  uint64_t length = 0;
  for (size_t i = prefix.size(); i-- > 0;) length = (length << 8) | static_cast<uint64_t>(prefix[i]);
  QLORAPP_CHECK_FORMAT(length <= static_cast<uint64_t>(kMaxHeaderBytes),
                       "[{}] header too large: it may have at most {} bytes; got {}. This is not a safetensors file.", where,
                       kMaxHeaderBytes, length);
  const auto header_bytes = static_cast<int64_t>(length);
  QLORAPP_CHECK_FORMAT(header_bytes <= size - kLengthBytes,
                       "[{}] invalid header length: {} bytes do not fit in a file of {}. It is truncated or of another kind.",
                       where, header_bytes, size);
  std::string json(static_cast<size_t>(header_bytes), '\0');
  reader_.read_at(kLengthBytes, std::as_writable_bytes(std::span(json)));
  const int64_t data_start = kLengthBytes + header_bytes;
  SafetensorsHeader header = parse_safetensors_header(json, size - data_start, where);
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
  for (TensorEntry& tensor : tensors_) tensor.offset += data_start;

  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0U);
  std::sort(by_name_.begin(), by_name_.end(), [&](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
  const auto twice = std::adjacent_find(by_name_.begin(), by_name_.end(),
                                        [&](uint32_t a, uint32_t b) { return tensors_[a].name == tensors_[b].name; });
  QLORAPP_CHECK_FORMAT(
      twice == by_name_.end(),
      "[{}] tensor names must be unique; got {} twice. Readers would disagree about its content: write the file again.", where,
      printable(tensors_[*twice].name));
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                      [&](uint32_t i, std::string_view n) { return tensors_[i].name < n; });
  return found != by_name_.end() && tensors_[*found].name == name ? &tensors_[*found] : nullptr;
}

const TensorEntry& SafetensorsFile::at(std::string_view name) const {
  if (const TensorEntry* tensor = find(name)) return *tensor;
  std::vector<std::string_view> known;
  if (tensors_.size() <= 10'000) {
    for (const TensorEntry& tensor : tensors_) known.push_back(tensor.name);
  }
  throw FormatError(
      message("[{}] the file must hold tensor {}; it does not.{}", path(), printable(name), did_you_mean(name, known)));
}

void SafetensorsFile::read(const TensorEntry& tensor, int64_t offset, std::span<std::byte> into) const {
  QLORAPP_CHECK_VALUE(offset >= 0 && offset <= tensor.nbytes && static_cast<uint64_t>(tensor.nbytes - offset) >= into.size(),
                      "[{}] a read must stay within tensor {} of {} bytes; got {} bytes at {}.", path(), printable(tensor.name),
                      tensor.nbytes, into.size(), offset);
  reader_.read_at(tensor.offset + offset, into);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors, const Metadata& metadata)
    : tensors_(laid_out(std::move(tensors))), remaining_(checked_total(tensors_)), file_(path) {
  const std::string header = make_header(tensors_, metadata);
  QLORAPP_CHECK_VALUE(static_cast<int64_t>(header.size()) <= kMaxHeaderBytes,
                      "[{}] a header may have at most {} bytes; got {}. Write several files.", path, kMaxHeaderBytes,
                      header.size());
  int64_t offset = kLengthBytes + static_cast<int64_t>(header.size());
  file_.reserve(offset + remaining_);
  for (TensorEntry& tensor : tensors_) offset = (tensor.offset = offset) + tensor.nbytes;
  std::string prefix;
  for (int shift = 0; shift < 64; shift += 8) prefix += static_cast<char>((static_cast<uint64_t>(header.size()) >> shift) & 0xff);
  file_.write(prefix);
  file_.write(header);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  QLORAPP_CHECK_VALUE(static_cast<uint64_t>(remaining_) >= bytes.size(),
                      "[safetensors] the tensors have {} bytes left; got {}. Write as many bytes as the shapes have.", remaining_,
                      bytes.size());
  file_.write(bytes);
  remaining_ -= static_cast<int64_t>(bytes.size());
}

void SafetensorsWriter::finish() {
  QLORAPP_CHECK_VALUE(remaining_ == 0,
                      "[safetensors] all tensors must be written; {} bytes are missing. Write as many bytes as the shapes have.",
                      remaining_);
  file_.commit();
}

void write_safetensors(const std::string& path, std::vector<TensorSpec> tensors, const Metadata& metadata,
                       const std::function<std::span<const std::byte>(const TensorEntry&)>& bytes_of) {
  SafetensorsWriter writer(path, std::move(tensors), metadata);
  for (const TensorEntry& tensor : writer.tensors()) {
    const std::span<const std::byte> bytes = bytes_of(tensor);
    QLORAPP_CHECK_VALUE(bytes.size() == static_cast<uint64_t>(tensor.nbytes),
                        "[safetensors] tensor {} has {} bytes; got {}. Pass its whole content.", printable(tensor.name),
                        tensor.nbytes, bytes.size());
    writer.write(bytes);
  }
  writer.finish();
}

}  // namespace qlorapp::format
