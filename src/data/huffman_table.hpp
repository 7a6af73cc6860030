// SPDX-License-Identifier: Apache-2.0
/// The prefix codes of deflate. Torch-free.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace qlorapp {

/// One canonical Huffman code (RFC 1951, 3.2.2): a table with an entry for every value of the next bits.
class HuffmanTable {
 public:
  static constexpr int kMaxBits = 15;
  struct Entry {
    uint16_t symbol = 0;
    uint8_t length = 0;  ///< Bits of the code; 0: no code begins like this.
  };

  /// @param lengths  bits of each symbol's code; 0: the symbol has none.
  /// @returns false if the lengths are no prefix code: more codes than fit, or fewer, except one code of one bit and none at all.
  [[nodiscard]] bool build(std::span<const uint8_t> lengths);
  [[nodiscard]] Entry operator[](uint32_t next_bits) const { return entries_[next_bits & (entries_.size() - 1)]; }

 private:
  std::vector<Entry> entries_ = std::vector<Entry>(1);
};

}  // namespace qlorapp
