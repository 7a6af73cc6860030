// SPDX-License-Identifier: Apache-2.0
#include "huffman_table.hpp"

#include <array>
#include <cstddef>

namespace qlorapp {

bool HuffmanTable::build(std::span<const uint8_t> lengths) {
  std::array<uint32_t, kMaxBits + 1> count{}, next{};
  for (const uint8_t length : lengths) ++count[length];
  count[0] = 0;
  int longest = 0;
  int64_t unused = 1;  // codes of the current length that no shorter one begins
  for (int length = 1; length <= kMaxBits; ++length) {
    unused = 2 * unused - count[length];
    if (unused < 0) return false;
    if (count[length] > 0) longest = length;
    next[length] = (next[length - 1] + count[length - 1]) << 1;
  }
  if (unused > 0 && longest > 1) return false;

  const uint32_t size = uint32_t{1} << longest;
  entries_.assign(size, {});
  for (std::size_t symbol = 0; symbol < lengths.size(); ++symbol) {
    const uint8_t length = lengths[symbol];
    if (length == 0) continue;
    const uint32_t code = next[length]++;
    uint32_t reversed = 0;  // codes are stored from their highest bit, everything else from its lowest
    for (int bit = 0; bit < length; ++bit) reversed |= ((code >> bit) & 1) << (length - 1 - bit);
    for (uint32_t at = reversed; at < size; at += uint32_t{1} << length) entries_[at] = {static_cast<uint16_t>(symbol), length};
  }
  return true;
}

}  // namespace qlorapp
