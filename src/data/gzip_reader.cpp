// SPDX-License-Identifier: Apache-2.0
#include "gzip_reader.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.hpp"

namespace qlorapp {
namespace {

constexpr uint64_t kMostTimes = 200, kHarmless = uint64_t{16} << 20;  // deflate reaches 1032
constexpr std::size_t kWindow = 32768;                                // how far back a match may reach
constexpr std::size_t kChunk = 65536;                                 // produced before it is handed out
constexpr std::size_t kLongestMatch = 258;
constexpr uint32_t kEndOfBlock = 256;
constexpr uint8_t kFirstMagic = 0x1F, kSecondMagic = 0x8B, kDeflate = 8;
enum HeaderFlag : uint8_t { kHeaderCrc = 2, kExtra = 4, kName = 8, kComment = 16, kReserved = 0xE0 };

struct Range {
  uint16_t base;
  uint8_t extra_bits;
};
// RFC 1951, 3.2.5: symbols 257 … 285 are lengths, 0 … 29 distances.
constexpr std::array<Range, 29> kLengths{{{3, 0},   {4, 0},   {5, 0},   {6, 0},   {7, 0},  {8, 0},  {9, 0},  {10, 0},
                                          {11, 1},  {13, 1},  {15, 1},  {17, 1},  {19, 2}, {23, 2}, {27, 2}, {31, 2},
                                          {35, 3},  {43, 3},  {51, 3},  {59, 3},  {67, 4}, {83, 4}, {99, 4}, {115, 4},
                                          {131, 5}, {163, 5}, {195, 5}, {227, 5}, {258, 0}}};
constexpr std::array<Range, 30> kDistances{
    {{1, 0},    {2, 0},    {3, 0},     {4, 0},     {5, 1},     {7, 1},     {9, 2},     {13, 2},     {17, 3},     {25, 3},
     {33, 4},   {49, 4},   {65, 5},    {97, 5},    {129, 6},   {193, 6},   {257, 7},   {385, 7},    {513, 8},    {769, 8},
     {1025, 9}, {1537, 9}, {2049, 10}, {3073, 10}, {4097, 11}, {6145, 11}, {8193, 12}, {12289, 12}, {16385, 13}, {24577, 13}}};
// RFC 1951, 3.2.7: the order in which the lengths of the code for code lengths are stored.
constexpr std::array<uint8_t, 19> kLengthOrder{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320U : 0U);
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

}  // namespace

uint32_t crc32(uint32_t crc, std::span<const char> bytes) {
  crc = ~crc;
  for (const char byte : bytes) crc = kCrcTable[(crc ^ static_cast<uint8_t>(byte)) & 255] ^ (crc >> 8);
  return ~crc;
}

GzipReader::GzipReader(Source source, std::string path)
    : source_(std::move(source)), path_(std::move(path)), in_(kChunk), out_(kWindow + kChunk + kLongestMatch) {}

std::size_t GzipReader::read(std::span<char> into) {
  if (given_ == out_end_) {
    const std::size_t kept = std::min(out_end_, kWindow);
    std::memmove(out_.data(), out_.data() + out_end_ - kept, kept);
    given_ = out_end_ = kept;
    while (out_end_ - given_ < kChunk && state_ != State::kEnd) step();
    unpacked_ += out_end_ - given_;
    if (unpacked_ > kHarmless && unpacked_ / kMostTimes > read_before_ + in_at_) {
      throw FormatError(
          message("[{}] a gzip file may unpack to {} times its bytes; these {} became {}. If you trust it, unpack it with "
                  "gunzip.",
                  path_, kMostTimes, read_before_ + in_at_, unpacked_));
    }
  }
  const std::size_t size = std::min(into.size(), out_end_ - given_);
  std::memcpy(into.data(), out_.data() + given_, size);
  given_ += size;
  return size;
}

void GzipReader::step() {
  step_begin_ = out_end_;
  switch (state_) {
    case State::kMember:
      read_member_header();
      break;
    case State::kBlock:
      read_block_header();
      break;
    case State::kStored:
      copy_stored();
      break;
    case State::kCodes:
      decode_symbols();
      break;
    case State::kTrailer:
      check_trailer();
      break;
    case State::kEnd:
      break;
  }
  const std::span<const char> produced(out_.data() + step_begin_, out_end_ - step_begin_);
  crc_ = crc32(crc_, produced);
  member_size_ += produced.size();
}

void GzipReader::read_member_header() {
  uint8_t first = 0;
  do {  // zeros may pad a file, as on tapes
    if (!first_member_ && at_end()) {
      state_ = State::kEnd;
      return;
    }
    header_crc_ = 0;
    first = header_byte();
  } while (!first_member_ && first == 0);
  if (first != kFirstMagic || header_byte() != kSecondMagic) damaged("a member must begin with 1F 8B");
  if (header_byte() != kDeflate) damaged("the compression method must be 8, deflate");
  const uint8_t flags = header_byte();
  if ((flags & kReserved) != 0) damaged("reserved header flags must be 0");
  for (int i = 0; i < 6; ++i) static_cast<void>(header_byte());  // time, compression level, operating system
  if ((flags & kExtra) != 0) {
    const uint32_t low = header_byte(), size = low | static_cast<uint32_t>(header_byte()) << 8;
    for (uint32_t i = 0; i < size; ++i) static_cast<void>(header_byte());
  }
  for (const HeaderFlag text : {kName, kComment}) {
    if ((flags & text) == 0) continue;
    while (header_byte() != 0) {}
  }
  if ((flags & kHeaderCrc) != 0) {
    const uint32_t expected = header_crc_ & 0xFFFF, low = next_byte();
    if ((low | static_cast<uint32_t>(next_byte()) << 8) != expected) damaged("the header must match its CRC");
  }
  first_member_ = false;
  crc_ = 0;
  member_size_ = 0;
  state_ = State::kBlock;
}

void GzipReader::read_block_header() {
  last_block_ = bits(1) == 1;
  switch (bits(2)) {
    case 0: {
      drop_to_byte();
      const uint32_t size = bits(16);
      if ((bits(16) ^ size) != 0xFFFF) damaged("the two sizes of a stored block must be complements");
      stored_left_ = size;
      state_ = State::kStored;
      return;
    }
    case 1: {
      std::array<uint8_t, 288> lengths{};
      std::fill(lengths.begin(), lengths.begin() + 144, uint8_t{8});
      std::fill(lengths.begin() + 144, lengths.begin() + 256, uint8_t{9});
      std::fill(lengths.begin() + 256, lengths.begin() + 280, uint8_t{7});
      std::fill(lengths.begin() + 280, lengths.end(), uint8_t{8});
      std::array<uint8_t, 32> distances{};
      distances.fill(5);
      static_cast<void>(literals_.build(lengths) && distances_.build(distances));
      state_ = State::kCodes;
      return;
    }
    case 2:
      read_code_lengths();
      state_ = State::kCodes;
      return;
    default:
      damaged("a block must be of type 0, 1 or 2");
  }
}

void GzipReader::read_code_lengths() {
  const uint32_t literals = bits(5) + 257, distances = bits(5) + 1, stored = bits(4) + 4;
  if (literals > 286 || distances > 30) damaged("a block may have 286 literal and 30 distance codes");
  std::array<uint8_t, kLengthOrder.size()> code{};
  for (uint32_t i = 0; i < stored; ++i) code[kLengthOrder[i]] = static_cast<uint8_t>(bits(3));
  HuffmanTable table;
  const bool complete = std::count_if(code.begin(), code.end(), [](uint8_t length) { return length > 0; }) > 1;
  if (!table.build(code) || !complete) damaged("the code of the code lengths must be a prefix code");

  std::array<uint8_t, 286 + 30> lengths{};
  for (uint32_t i = 0; i < literals + distances;) {
    const uint32_t next = symbol(table);
    if (next < 16) {
      lengths[i++] = static_cast<uint8_t>(next);
      continue;
    }
    if (next == 16 && i == 0) damaged("a repeated code length needs one before it");
    const uint8_t value = next == 16 ? lengths[i - 1] : uint8_t{0};
    const uint32_t times = next == 16 ? 3 + bits(2) : next == 17 ? 3 + bits(3) : 11 + bits(7);
    if (i + times > literals + distances) damaged("a block may not have more code lengths than it states");
    std::fill_n(lengths.begin() + i, times, value);
    i += times;
  }
  if (lengths[kEndOfBlock] == 0) damaged("a block must have a code for its end");
  const std::span<const uint8_t> all(lengths);
  if (!literals_.build(all.first(literals))) damaged("the literal codes of a block must be a prefix code");
  if (!distances_.build(all.subspan(literals, distances))) damaged("the distance codes of a block must be a prefix code");
}

void GzipReader::copy_stored() {
  for (; stored_left_ > 0 && out_end_ - given_ < kChunk; --stored_left_) out_[out_end_++] = static_cast<char>(bits(8));
  if (stored_left_ == 0) end_block();
}

void GzipReader::decode_symbols() {
  while (out_end_ - given_ < kChunk) {
    const uint32_t next = symbol(literals_);
    if (next < kEndOfBlock) {
      out_[out_end_++] = static_cast<char>(next);
      continue;
    }
    if (next == kEndOfBlock) {
      end_block();
      return;
    }
    if (next - 257 >= kLengths.size()) damaged("a length code must be one of 29");
    const Range length = kLengths[next - 257];
    const std::size_t bytes = length.base + bits(length.extra_bits);
    const uint32_t code = symbol(distances_);
    if (code >= kDistances.size()) damaged("a distance code must be one of 30");
    copy_match(bytes, kDistances[code].base + bits(kDistances[code].extra_bits));
  }
}

void GzipReader::copy_match(std::size_t length, std::size_t distance) {
  if (distance > member_size_ + (out_end_ - step_begin_)) damaged("a match may not begin before the data");
  for (std::size_t i = 0; i < length; ++i, ++out_end_) out_[out_end_] = out_[out_end_ - distance];  // may overlap: byte by byte
}

void GzipReader::check_trailer() {
  drop_to_byte();
  const uint32_t low = bits(16), crc = low | bits(16) << 16;
  const uint32_t low_size = bits(16), size = low_size | bits(16) << 16;
  if (crc != crc_) damaged("the data must match the CRC of the file");
  if (size != static_cast<uint32_t>(member_size_)) damaged("the data must be as long as the file states");
  state_ = State::kMember;
}

bool GzipReader::at_end() {
  if (available_ > 0) return false;
  if (in_at_ < in_size_) return false;
  read_before_ += in_size_;
  in_at_ = 0;
  in_size_ = source_(in_);
  return in_size_ == 0;
}

uint8_t GzipReader::next_byte() {
  if (available_ > 0) return static_cast<uint8_t>(bits(8));
  if (at_end()) damaged("the file must be complete; it ends early");
  return static_cast<uint8_t>(in_[in_at_++]);
}

uint8_t GzipReader::header_byte() {
  const uint8_t byte = next_byte();
  const char as_char = static_cast<char>(byte);
  header_crc_ = crc32(header_crc_, {&as_char, 1});
  return byte;
}

void GzipReader::load_bits(int count) {
  while (available_ < count) {
    if (in_at_ == in_size_) {
      read_before_ += in_size_;
      in_at_ = 0;
      in_size_ = source_(in_);
      if (in_size_ == 0) return;
    }
    accumulator_ |= static_cast<uint64_t>(static_cast<uint8_t>(in_[in_at_++])) << available_;
    available_ += 8;
  }
}

uint32_t GzipReader::bits(int count) {
  load_bits(count);
  if (available_ < count) damaged("the file must be complete; it ends early");
  const auto value = static_cast<uint32_t>(accumulator_ & ((uint64_t{1} << count) - 1));
  accumulator_ >>= count;
  available_ -= count;
  return value;
}

uint32_t GzipReader::symbol(const HuffmanTable& table) {
  load_bits(HuffmanTable::kMaxBits);
  const HuffmanTable::Entry entry = table[static_cast<uint32_t>(accumulator_)];
  if (entry.length > available_) damaged("the file must be complete; it ends early");
  if (entry.length == 0) damaged("a code must be in the table of its block");
  accumulator_ >>= entry.length;
  available_ -= entry.length;
  return entry.symbol;
}

void GzipReader::drop_to_byte() {
  const int partial = available_ % 8;
  accumulator_ >>= partial;
  available_ -= partial;
}

void GzipReader::damaged(const char* what) const {
  throw FormatError(message("[{}] must be an undamaged gzip file: {} (near byte {}). Download or compress it again.", path_, what,
                            read_before_ + in_at_ - static_cast<uint64_t>(available_ / 8)));
}

}  // namespace qlorapp
