// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "gguf.hpp"

namespace qlorapp::format {
namespace {

constexpr int64_t kMostEntries = 65'536;
constexpr int64_t kLongestKey = 255, kLongestTensorName = 63, kLongestString = int64_t{64} << 20;
constexpr int64_t kLongestArray = int64_t{1} << 24;  ///< Elements. The longest known list, of merges, has a million.
constexpr int64_t kWindow = int64_t{1} << 20;
constexpr int64_t kMostElements = int64_t{1} << 48;

/// Types of values.
enum Type : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

/// Kinds of blocks that are not read here, by ggml's numbers.
std::string type_name(uint32_t number) {
  constexpr auto kOthers = std::to_array<std::pair<uint32_t, std::string_view>>({{10, "Q2_K"},
                                                                                 {11, "Q3_K"},
                                                                                 {15, "Q8_K"},
                                                                                 {16, "IQ2_XXS"},
                                                                                 {17, "IQ2_XS"},
                                                                                 {18, "IQ3_XXS"},
                                                                                 {19, "IQ1_S"},
                                                                                 {20, "IQ4_NL"},
                                                                                 {21, "IQ3_S"},
                                                                                 {22, "IQ2_S"},
                                                                                 {23, "IQ4_XS"},
                                                                                 {29, "IQ1_M"},
                                                                                 {34, "TQ1_0"},
                                                                                 {35, "TQ2_0"},
                                                                                 {39, "MXFP4"}});
  const auto found = std::ranges::find(kOthers, number, &std::pair<uint32_t, std::string_view>::first);
  return found == kOthers.end() ? message("number {}", number) : std::string(found->second);
}

/// Without overlong forms and surrogates.
bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      const bool in_range = k > 1 || !((lead == 0xe0 && next < 0xa0) || (lead == 0xed && next > 0x9f) ||
                                       (lead == 0xf0 && next < 0x90) || (lead == 0xf4 && next > 0x8f));
      if ((next & 0xc0) != 0x80 || !in_range) return false;
    }
    i += length;
  }
  return true;
}

/// Reads on from byte to byte, through a window of the file.
class Cursor {
 public:
  explicit Cursor(const files::FileReader& reader) : reader_(reader) {}

  [[nodiscard]] int64_t at() const { return at_; }
  [[noreturn]] void refuse(int64_t byte, const std::string& rule) const {
    throw FormatError(
        message("[{}] byte {}: {} The file is damaged, or no GGUF file; fetch it again.", reader_.path(), byte, rule));
  }

  template <class T>
  T number() {
    T value;
    const std::string_view bytes = take(sizeof(T));
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  /// A count of things of at least `bytes` each, which the file must have room for.
  int64_t count(const char* what, int64_t most, int64_t bytes) {
    const int64_t from = at_;
    const auto value = number<uint64_t>();
    const int64_t room = (reader_.size() - at_) / bytes;
    if (value > static_cast<uint64_t>(most)) refuse(from, message("{} must be at most {}; got {}.", what, most, value));
    if (static_cast<int64_t>(value) > room)
      refuse(from, message("{} is {}, for which the file is too short: it has {} bytes left.", what, value, reader_.size() - at_));
    return static_cast<int64_t>(value);
  }
  std::string string(const char* what, int64_t most) {
    const int64_t from = at_;
    const int64_t length = count("the length of a string", most, 1);
    std::string text(take(length));
    if (!is_utf8(text)) refuse(from, message("{} must be UTF-8; it is not.", what));
    return text;
  }

 private:
  /// Valid until the next call.
  std::string_view take(int64_t bytes) {
    if (at_ + bytes > reader_.size())
      refuse(at_, message("{} bytes are wanted here; the file ends after {}.", bytes, reader_.size() - at_));
    const int64_t end = begin_ + static_cast<int64_t>(window_.size());
    if (at_ < begin_ || at_ + bytes > end) {
      window_.resize(static_cast<size_t>(std::min(std::max(bytes, kWindow), reader_.size() - at_)));
      reader_.read_at(at_, std::as_writable_bytes(std::span(window_)));
      begin_ = at_;
    }
    const std::string_view found(window_.data() + (at_ - begin_), static_cast<size_t>(bytes));
    at_ += bytes;
    return found;
  }

  const files::FileReader& reader_;
  int64_t at_ = 0, begin_ = 0;
  std::vector<char> window_;
};

class Parser {
 public:
  explicit Parser(const files::FileReader& reader) : reader_(reader), cursor_(reader) {}

  void parse(std::map<std::string, GgufFile::Value>& metadata, std::vector<GgufEntry>& tensors) {
    if (cursor_.number<uint32_t>() != std::bit_cast<uint32_t>(std::array<char, 4>{'G', 'G', 'U', 'F'}))
      cursor_.refuse(0, "a GGUF file must begin with GGUF; it does not.");
    const auto version = cursor_.number<uint32_t>();
    if (version != 2 && version != 3) cursor_.refuse(4, message("the version must be 2 or 3; got {}.", version));
    const int64_t count = cursor_.count("the number of tensors", kMostEntries, 24),
                  keys = cursor_.count("the number of keys", kMostEntries, 13);
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t from = cursor_.at();
      std::string key = cursor_.string("a key", kLongestKey);
      GgufFile::Value value = this->value(cursor_.number<uint32_t>());
      if (key.empty() || !metadata.emplace(key, std::move(value)).second)
        cursor_.refuse(from, message("a key must have a name of its own; {} has not.", printable(key)));
    }
    const int64_t alignment = alignment_of(metadata);
    for (int64_t i = 0; i < count; ++i) tensors.push_back(entry());
    place(tensors, alignment);
    std::ranges::sort(tensors, {}, &GgufEntry::name);
    for (size_t i = 1; i < tensors.size(); ++i) {
      if (tensors[i].name == tensors[i - 1].name)
        cursor_.refuse(cursor_.at(),
                       message("a tensor must have a name of its own; {} is there twice.", printable(tensors[i].name)));
    }
  }

 private:
  template <class T, class As>
  std::vector<As> numbers(int64_t count) {
    std::vector<As> out;
    out.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<As>(cursor_.number<T>()));
    return out;
  }

  GgufFile::Value value(uint32_t type) {
    const int64_t from = cursor_.at();
    switch (type) {
      case kU8:
        return int64_t{cursor_.number<uint8_t>()};
      case kI8:
        return int64_t{cursor_.number<int8_t>()};
      case kU16:
        return int64_t{cursor_.number<uint16_t>()};
      case kI16:
        return int64_t{cursor_.number<int16_t>()};
      case kU32:
        return int64_t{cursor_.number<uint32_t>()};
      case kI32:
        return int64_t{cursor_.number<int32_t>()};
      case kF32:
        return double{cursor_.number<float>()};
      case kBool:
        return int64_t{cursor_.number<uint8_t>() != 0};
      case kString:
        return cursor_.string("a value", kLongestString);
      case kU64: {
        const auto wide = cursor_.number<uint64_t>();
        if (wide > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
          cursor_.refuse(from, message("a number must be below 2^63; got {}.", wide));
        return static_cast<int64_t>(wide);
      }
      case kI64:
        return cursor_.number<int64_t>();
      case kF64:
        return cursor_.number<double>();
      case kArray:
        return array();
      default:
        cursor_.refuse(from - 4, message("the type of a value must be 0 to 12; got {}.", type));
    }
  }

  GgufFile::Value array() {
    const int64_t from = cursor_.at();
    const auto type = cursor_.number<uint32_t>();
    constexpr auto kBytes = std::to_array<int64_t>({1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8});
    if (type >= kBytes.size() || type == kArray)
      cursor_.refuse(from, message("an array must be of numbers, truths or strings; its type is {}.", type));
    const int64_t count = cursor_.count("the length of an array", kLongestArray, kBytes[type]);
    switch (type) {
      case kU8:
      case kBool:
        return numbers<uint8_t, int64_t>(count);
      case kI8:
        return numbers<int8_t, int64_t>(count);
      case kU16:
        return numbers<uint16_t, int64_t>(count);
      case kI16:
        return numbers<int16_t, int64_t>(count);
      case kU32:
        return numbers<uint32_t, int64_t>(count);
      case kI32:
        return numbers<int32_t, int64_t>(count);
      case kU64:
      case kI64:
        return numbers<int64_t, int64_t>(count);
      case kF32:
        return numbers<float, double>(count);
      case kF64:
        return numbers<double, double>(count);
      default:
        break;
    }
    std::vector<std::string> texts;
    for (int64_t i = 0; i < count; ++i) texts.push_back(cursor_.string("a string of an array", kLongestString));
    return texts;
  }

  int64_t alignment_of(const std::map<std::string, GgufFile::Value>& metadata) const {
    const auto found = metadata.find("general.alignment");
    if (found == metadata.end()) return 32;
    const auto* const value = std::get_if<int64_t>(&found->second);
    if (value == nullptr || *value < 1 || *value > 65'536 || !std::has_single_bit(static_cast<uint64_t>(*value)))
      cursor_.refuse(cursor_.at(), "general.alignment must be a power of two of at most 65,536; it is not.");
    return *value;
  }

  GgufEntry entry() {
    const int64_t from = cursor_.at();
    GgufEntry entry;
    entry.name = cursor_.string("the name of a tensor", kLongestTensorName);
    const auto dimensions = cursor_.number<uint32_t>();
    if (dimensions < 1 || dimensions > 4)
      cursor_.refuse(from, message("a tensor must have 1 to 4 extents; {} has {}.", printable(entry.name), dimensions));
    int64_t elements = 1;
    for (uint32_t i = 0; i < dimensions; ++i) {
      const auto extent = cursor_.number<uint64_t>();
      if (extent < 1 || extent > static_cast<uint64_t>(kMostElements / elements))
        cursor_.refuse(from, message("the extents of {} must be above 0 and have at most 2^48 elements together; one is {}.",
                                     printable(entry.name), extent));
      elements *= static_cast<int64_t>(extent);
      entry.shape.insert(entry.shape.begin(), static_cast<int64_t>(extent));
    }
    const auto type = cursor_.number<uint32_t>();
    const GgufBlock* const block = find_block(type);
    if (block == nullptr) {
      throw FormatError(message(
          "[{}] byte {}: tensor {} must be in F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K; it is in {}. Use "
          "a file of another type.",
          reader_.path(), from, printable(entry.name), type_name(type)));
    }
    entry.type = block->type;
    if (entry.shape.back() % block->elements != 0)
      cursor_.refuse(from, message("rows in {} must be whole blocks of {}; those of {} have {}.", block->name, block->elements,
                                   printable(entry.name), entry.shape.back()));
    const auto offset = cursor_.number<uint64_t>();
    if (offset > static_cast<uint64_t>(reader_.size()))
      cursor_.refuse(from, message("tensor {} must lie in the file; its offset is {}.", printable(entry.name), offset));
    entry.offset = static_cast<int64_t>(offset);
    return entry;
  }

  /// Offsets count from the end of what was read, aligned.
  void place(std::vector<GgufEntry>& tensors, int64_t alignment) const {
    const int64_t data = (cursor_.at() + alignment - 1) / alignment * alignment;
    std::vector<GgufEntry*> order;
    for (GgufEntry& tensor : tensors) {
      if (tensor.offset % alignment != 0)
        cursor_.refuse(cursor_.at(), message("the offset of {} must be a multiple of {}; got {}.", printable(tensor.name),
                                             alignment, tensor.offset));
      tensor.offset += data;
      order.push_back(&tensor);
    }
    std::ranges::sort(order, {}, &GgufEntry::offset);
    int64_t end = data;
    for (const GgufEntry* const tensor : order) {
      if (tensor->offset < end)
        cursor_.refuse(tensor->offset, message("tensors must not overlap; {} begins in another.", printable(tensor->name)));
      end = tensor->offset + tensor->nbytes();
      if (end > reader_.size())
        cursor_.refuse(tensor->offset, message("tensor {} has {} bytes; the file ends after {}.", printable(tensor->name),
                                               tensor->nbytes(), reader_.size() - tensor->offset));
    }
  }

  const files::FileReader& reader_;
  Cursor cursor_;
};

}  // namespace

GgufFile::GgufFile(const std::string& path) : reader_(path) { Parser(reader_).parse(metadata_, tensors_); }

const GgufEntry* GgufFile::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(tensors_, name, {}, &GgufEntry::name);
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

void GgufFile::refuse_type(const std::string& key) const {
  throw FormatError(message("[{}] the value of {} has another type than llama.cpp gives it. Use another file of the model.", path(),
                            printable(key)));
}

void GgufFile::refuse_missing(const std::string& key) const {
  throw FormatError(
      message("[{}] the file must have the key {}; it has not. Use another file of the model.", path(), printable(key)));
}

void GgufFile::read(const GgufEntry& tensor, int64_t offset, std::span<std::byte> into) const {
  const auto bytes = static_cast<int64_t>(into.size());
  QLORAPP_CHECK_VALUE(offset >= 0 && offset <= tensor.nbytes() && bytes <= tensor.nbytes() - offset,
                      "[{}] bytes {} to {} must be within tensor {}, which has {}.", path(), offset, offset + bytes,
                      printable(tensor.name), tensor.nbytes());
  reader_.read_at(tensor.offset + offset, into);
}

}  // namespace qlorapp::format
