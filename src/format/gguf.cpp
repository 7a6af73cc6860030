// SPDX-License-Identifier: Apache-2.0
#include "gguf.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <type_traits>

#include "core/check.hpp"

namespace qlorapp::format {
namespace {

constexpr int64_t kAlignment = 32;
constexpr size_t kLongestName = 63;  // ggml keeps 64 bytes, the last one NUL

constexpr auto kBlocks = std::to_array<GgufBlock>({{GgufType::kF32, "F32", 1, 4},
                                                   {GgufType::kF16, "F16", 1, 2},
                                                   {GgufType::kBF16, "BF16", 1, 2},
                                                   {GgufType::kQ4_0, "Q4_0", 32, 18},
                                                   {GgufType::kQ4_1, "Q4_1", 32, 20},
                                                   {GgufType::kQ5_0, "Q5_0", 32, 22},
                                                   {GgufType::kQ5_1, "Q5_1", 32, 24},
                                                   {GgufType::kQ8_0, "Q8_0", 32, 34},
                                                   {GgufType::kQ4_K, "Q4_K", 256, 144},
                                                   {GgufType::kQ5_K, "Q5_K", 256, 176},
                                                   {GgufType::kQ6_K, "Q6_K", 256, 210}});

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Bytes of the part before the tensors.
class Header {
 public:
  void number(auto value) {
    static_assert(std::endian::native == std::endian::little);
    const auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
    text_.append(bytes.data(), bytes.size());
  }
  void string(std::string_view text) {
    number(static_cast<uint64_t>(text.size()));
    text_ += text;
  }
  void value(const GgufValue& value) {
    std::visit(
        [this]<class T>(const T& typed) {
          if constexpr (requires { typename T::allocator_type; } && !std::is_same_v<T, std::string>) {
            number(uint32_t{9});
            number(number_of<typename T::value_type>());
            number(static_cast<uint64_t>(typed.size()));
            for (const typename T::value_type& element : typed) put(element);
          } else {
            number(number_of<T>());
            put(typed);
          }
        },
        value);
  }
  [[nodiscard]] std::string_view text() const { return text_; }
  void align() { text_.resize(static_cast<size_t>(aligned(static_cast<int64_t>(text_.size())))); }

 private:
  /// The number of a value's type in a file.
  template <class T>
  static constexpr uint32_t number_of() {
    if constexpr (std::is_same_v<T, uint32_t>) return 4;
    else if constexpr (std::is_same_v<T, int32_t>) return 5;
    else if constexpr (std::is_same_v<T, float>) return 6;
    else if constexpr (std::is_same_v<T, bool>) return 7;
    else return 8;
  }
  void put(const std::string& value) { string(value); }
  void put(bool value) { number(static_cast<uint8_t>(value ? 1 : 0)); }
  void put(uint32_t value) { number(value); }
  void put(int32_t value) { number(value); }
  void put(float value) { number(value); }

  std::string text_;
};

std::string header_of(const GgufMetadata& metadata, const std::vector<GgufTensor>& tensors) {
  Header header;
  header.number(std::array<char, 4>{'G', 'G', 'U', 'F'});
  header.number(uint32_t{3});
  header.number(static_cast<uint64_t>(tensors.size()));
  header.number(static_cast<uint64_t>(metadata.size()));
  for (const auto& [key, value] : metadata) {
    header.string(key);
    header.value(value);
  }
  int64_t offset = 0;
  for (const GgufTensor& tensor : tensors) {
    header.string(tensor.name);
    header.number(static_cast<uint32_t>(tensor.shape.size()));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent)
      header.number(static_cast<uint64_t>(*extent));
    header.number(static_cast<uint32_t>(tensor.type));
    header.number(static_cast<uint64_t>(offset));
    offset += aligned(tensor.nbytes());
  }
  header.align();
  return std::string(header.text());
}

std::vector<GgufTensor> checked(std::vector<GgufTensor> tensors) {
  std::set<std::string_view> names;
  for (const GgufTensor& tensor : tensors) {
    QLORAPP_CHECK_VALUE(!tensor.name.empty() && tensor.name.size() <= kLongestName,
                        "[gguf] the name of a tensor must have 1 to {} bytes; '{}' has {}.", kLongestName, tensor.name,
                        tensor.name.size());
    QLORAPP_CHECK_VALUE(names.insert(tensor.name).second, "[gguf] a tensor must have a name of its own; '{}' appears twice.",
                        tensor.name);
    const GgufBlock& block = block_of(tensor.type);
    QLORAPP_CHECK_VALUE(!tensor.shape.empty() && tensor.shape.size() <= 4,
                        "[gguf] a tensor must have 1 to 4 dimensions; '{}' has {}.", tensor.name, tensor.shape.size());
    QLORAPP_CHECK_VALUE(
        tensor.shape.back() % block.elements == 0,
        "[gguf] rows in {} must be whole blocks of {} elements; those of '{}' have {}. Use a type with smaller blocks.", block.name,
        block.elements, tensor.name, tensor.shape.back());
  }
  return tensors;
}

}  // namespace

const GgufBlock& block_of(GgufType type) { return *std::ranges::find(kBlocks, type, &GgufBlock::type); }

const GgufBlock* find_block(uint32_t number) {
  const auto* const found = std::ranges::find(kBlocks, static_cast<GgufType>(number), &GgufBlock::type);
  return found == kBlocks.end() ? nullptr : found;
}

int64_t GgufTensor::nbytes() const {
  const GgufBlock& block = block_of(type);
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count / block.elements * block.bytes;
}

GgufWriter::GgufWriter(const std::string& path, const GgufMetadata& metadata, std::vector<GgufTensor> tensors)
    : tensors_(checked(std::move(tensors))), file_(path) {
  const std::string header = header_of(metadata, tensors_);
  int64_t bytes = static_cast<int64_t>(header.size());
  for (const GgufTensor& tensor : tensors_) bytes += aligned(tensor.nbytes());
  file_.reserve(bytes);
  file_.write(header);
  if (!tensors_.empty()) left_ = tensors_.front().nbytes();
}

void GgufWriter::pad() {
  const int64_t bytes = aligned(written_) - written_;
  file_.write(std::string(static_cast<size_t>(bytes), '\0'));
  written_ += bytes;
}

void GgufWriter::write(std::span<const std::byte> bytes) {
  QLORAPP_CHECK_VALUE(current_ < tensors_.size() && static_cast<int64_t>(bytes.size()) <= left_,
                      "[gguf] the tensor has {} bytes left; got {}. Write as many bytes as its shape has.", left_, bytes.size());
  file_.write(bytes);
  written_ += static_cast<int64_t>(bytes.size());
  left_ -= static_cast<int64_t>(bytes.size());
  if (left_ > 0) return;
  pad();
  if (++current_ < tensors_.size()) left_ = tensors_[current_].nbytes();
}

void GgufWriter::finish() {
  QLORAPP_CHECK_VALUE(current_ == tensors_.size(), "[gguf] all tensors must be written; '{}' lacks {} bytes.",
                      tensors_[current_].name, left_);
  file_.commit();
}

}  // namespace qlorapp::format
