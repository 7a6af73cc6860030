// SPDX-License-Identifier: Apache-2.0
/// The bytes inside a gzip file (RFC 1951 and 1952), a piece at a time. Torch-free. Own code instead of zlib: docs/adr/0019-own-gzip-reader.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "huffman_table.hpp"

namespace qlorapp {

/// Decompresses one gzip file of one or more members. Trusts nothing in it: lengths, codes, distances, CRC-32 and size are
/// checked. Memory is fixed, 300 KB, whatever the file holds; a file that unpacks to more than 16 MiB and 200 times its own bytes is refused.
class GzipReader {
 public:
  /// Fills a span with compressed bytes. @returns how many; 0 at the end.
  using Source = std::function<std::size_t(std::span<char>)>;

  /// @param path  stands in messages.
  GzipReader(Source source, std::string path);

  /// @returns how many bytes `into` received; 0 at the end.
  /// @throws FormatError "[path] …" for a file that is cut off, damaged or no gzip file, once reading reaches that place.
  [[nodiscard]] std::size_t read(std::span<char> into);

 private:
  enum class State { kMember, kBlock, kStored, kCodes, kTrailer, kEnd };

  void step();
  void read_member_header();
  void read_block_header();
  void read_code_lengths();
  void copy_stored();
  void decode_symbols();
  void copy_match(std::size_t length, std::size_t distance);
  void check_trailer();
  void end_block() { state_ = last_block_ ? State::kTrailer : State::kBlock; }

  [[nodiscard]] bool at_end();
  [[nodiscard]] uint8_t next_byte();       ///< Straight from the source; between bytes only.
  [[nodiscard]] uint8_t header_byte();     ///< next_byte(), counted in the header's CRC.
  [[nodiscard]] uint32_t bits(int count);  ///< The next bits, lowest first; at most 16.
  [[nodiscard]] uint32_t symbol(const HuffmanTable& table);
  void load_bits(int count);  ///< Up to `count` bits into the accumulator, fewer at the end of the file.
  void drop_to_byte();
  [[noreturn]] void damaged(const char* what) const;

  Source source_;
  std::string path_;
  std::vector<char> in_;
  std::size_t in_at_ = 0, in_size_ = 0;
  uint64_t read_before_ = 0;  ///< Compressed bytes in front of in_.
  uint64_t accumulator_ = 0;
  int available_ = 0;

  std::vector<char> out_;  ///< The window, then what was not handed out yet.
  std::size_t out_end_ = 0, given_ = 0;
  State state_ = State::kMember;
  bool last_block_ = false, first_member_ = true;
  std::size_t stored_left_ = 0;
  HuffmanTable literals_, distances_;
  uint32_t crc_ = 0, header_crc_ = 0;
  uint64_t unpacked_ = 0;     ///< Bytes in all.
  uint64_t member_size_ = 0;  ///< Bytes of the member up to the current step.
  std::size_t step_begin_ = 0;
};

/// CRC-32 of gzip and PNG (polynomial 0xEDB88320), continued from `crc`; 0 at the beginning.
[[nodiscard]] uint32_t crc32(uint32_t crc, std::span<const char> bytes);

}  // namespace qlorapp
