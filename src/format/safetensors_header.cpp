// SPDX-License-Identifier: Apache-2.0
#include "safetensors_header.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "json/json_cursor.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";

/// Where in the header the next event belongs.
enum class Place { kStart, kNames, kMetadata, kTensor, kDtype, kBeforeShape, kShape, kBeforeOffsets, kOffsets };

/// Turns events into entries. TensorEntry::offset and nbytes hold begin and end until the ranges are checked.
class HeaderReader {
 public:
  HeaderReader(std::string_view where, const size_t& position) : where_(where), position_(position) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("a boolean"); }
  bool number_integer(int64_t) { unexpected("a negative number"); }
  bool number_float(double, const std::string&) { unexpected("a number that is not a 64-bit integer"); }
  bool binary(std::vector<uint8_t>&) { return false; }
  bool number_unsigned(uint64_t value) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) unexpected("a number that is not a 64-bit integer");
    const auto number = static_cast<int64_t>(value);
    TensorEntry& tensor = header_.tensors.back();
    if (place_ == Place::kShape) {
      if (tensor.shape.size() == kMaxTensorRank)
        fail("a tensor may have at most {} dimensions; {} has more", kMaxTensorRank, printable(tensor.name));
      tensor.shape.push_back(number);
    } else {
      if (offsets_ == 2) fail("data_offsets must be two numbers; {} has more", printable(tensor.name));
      (offsets_++ == 0 ? tensor.offset : tensor.nbytes) = number;
    }
    return true;
  }
  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      if (!header_.metadata.emplace(std::move(metadata_key_), std::move(value)).second)
        fail("metadata keys must be unique; got one twice");
      return true;
    }
    if (place_ != Place::kDtype) unexpected("a string");
    const auto dtype = dtype_from_name(value);
    if (!dtype) fail("unknown dtype {} of tensor {}", printable(value, 24), printable(header_.tensors.back().name));
    header_.tensors.back().dtype = *dtype;
    place_ = Place::kTensor;
    return true;
  }
  bool start_object(size_t) {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kNames;
        return true;
      case Place::kNames:
        place_ = next_is_metadata_ ? Place::kMetadata : Place::kTensor;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return true;
      default:
        unexpected("an object");
    }
  }
  bool key(std::string& name) {
    switch (place_) {
      case Place::kNames:
        begin_name(name);
        break;
      case Place::kMetadata:
        metadata_key_ = std::move(name);
        break;
      default:
        if (name == "dtype") begin_field(has_dtype_, Place::kDtype, name);
        else if (name == "shape") begin_field(has_shape_, Place::kBeforeShape, name);
        else if (name == "data_offsets") begin_field(has_offsets_, Place::kBeforeOffsets, name);
        else fail("unknown field {} of tensor {}", printable(name), printable(header_.tensors.back().name));
    }
    return true;
  }
  bool end_object() {
    if (place_ == Place::kTensor && !(has_dtype_ && has_shape_ && has_offsets_)) {
      fail("a tensor needs dtype, shape and data_offsets; {} lacks one", printable(header_.tensors.back().name));
    }
    place_ = Place::kNames;
    return true;
  }
  bool start_array(size_t) {
    if (place_ == Place::kBeforeShape) place_ = Place::kShape;
    else if (place_ == Place::kBeforeOffsets) {
      place_ = Place::kOffsets;
      offsets_ = 0;
    } else unexpected("an array");
    return true;
  }
  bool end_array() {
    if (place_ == Place::kOffsets && offsets_ != 2)
      fail("data_offsets must be two numbers; {} has fewer", printable(header_.tensors.back().name));
    place_ = Place::kTensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    const bool utf8 = std::string_view(error.what()).find("UTF-8") != std::string_view::npos;
    if (utf8) throw FormatError(message("[{}] invalid UTF-8 in header, at byte {}. The file is damaged.", where_, position));
    std::string where(where_);
    fail_parse(where + "] [header", position, error);
  }

 private:
  void begin_name(std::string& name) {
    if (name.size() > kMaxTensorNameBytes)
      fail("a tensor name may have at most {} bytes; got {}", kMaxTensorNameBytes, name.size());
    next_is_metadata_ = name == kMetadataKey;
    if (next_is_metadata_) {
      if (std::exchange(seen_metadata_, true)) fail("the header must hold __metadata__ once; got it twice");
      return;
    }
    if (header_.tensors.size() == kMaxTensors) fail("a file may hold at most {} tensors; got more", kMaxTensors);
    header_.tensors.emplace_back().name = std::move(name);
  }
  void begin_field(bool& seen, Place place, std::string_view field) {
    if (std::exchange(seen, true))
      fail("a field must appear once; tensor {} has {} twice", printable(header_.tensors.back().name), field);
    place_ = place;
  }
  template <class... Args>
  [[noreturn]] void fail(Format<Args...> text, Args&&... args) const {
    throw FormatError(message("[{}] invalid JSON in header: {}, at byte {} of it. Write the file again.", where_,
                              message(text, std::forward<Args>(args)...), position_));
  }
  [[noreturn]] void unexpected(std::string_view what) const {
    fail("it must be {{name: {{dtype, shape, data_offsets}}}}; got {} elsewhere", what);
  }

  std::string_view where_;
  const size_t& position_;
  SafetensorsHeader header_;
  Place place_ = Place::kStart;
  bool next_is_metadata_ = false, seen_metadata_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int offsets_ = 0;
  std::string metadata_key_;
};

}  // namespace

bool tensor_bytes(Dtype dtype, const std::vector<int64_t>& shape, int64_t& bytes, bool& misaligned) {
  misaligned = false;
  int64_t bits = 1;
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(bits, size, &bits)) return false;
  }
  if (__builtin_mul_overflow(bits, dtype_bits(dtype), &bits)) return false;
  misaligned = bits % 8 != 0;
  bytes = bits / 8;
  return !misaligned;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, std::string_view where) {
  refuse_bytes_outside_json(json, where);
  size_t position = 0;
  HeaderReader reader(where, position);
  JsonCursor::parse(json, position, reader);
  SafetensorsHeader header = reader.take();

  auto& tensors = header.tensors;
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.offset, a.nbytes) < std::pair(b.offset, b.nbytes);
  });
  int64_t expected = 0;
  for (TensorEntry& tensor : tensors) {
    const int64_t begin = tensor.offset, end = std::exchange(tensor.nbytes, 0);
    QLORAPP_CHECK_FORMAT(begin == expected && end >= begin,
                         "[{}] invalid offset for tensor {}: ranges must follow each other without gap or overlap; got [{}, {}) "
                         "where {} is the next free byte. Write the file again.",
                         where, printable(tensor.name), begin, end, expected);
    int64_t bytes = 0;
    bool misaligned = false;
    const bool sized = tensor_bytes(tensor.dtype, tensor.shape, bytes, misaligned);
    QLORAPP_CHECK_FORMAT(sized || misaligned, "[{}] the size of tensor {} overflows 64 bits. The header is damaged or hostile.",
                         where, printable(tensor.name));
    QLORAPP_CHECK_FORMAT(sized, "[{}] tensor {} does not fill whole bytes. The header is damaged.", where, printable(tensor.name));
    QLORAPP_CHECK_FORMAT(end - begin == bytes,
                         "[{}] invalid shape, data type, or offset for tensor {}: dtype {} and shape {} need {} bytes; the range "
                         "has {}. The header is damaged.",
                         where, printable(tensor.name), dtype_name(tensor.dtype), joined(tensor.shape), bytes, end - begin);
    tensor.nbytes = bytes;
    expected = end;
  }
  QLORAPP_CHECK_FORMAT(
      expected == data_bytes, "[{}] incomplete metadata, file not fully covered: the tensors need {} bytes; the file has {}{}",
      where, expected, data_bytes,
      data_bytes < expected ? ". It is truncated: copy or download it again." : ". It has bytes after its tensors.");
  return header;
}

}  // namespace qlorapp::format
