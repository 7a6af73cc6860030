// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/nf4.hpp"

#include <cmath>
#include <limits>

#include "catch.hpp"
#include "format/double_quant.hpp"
#include "reference/four_bit.hpp"

using namespace qlorapp;

TEST_CASE("the code books are the published decimals, rounded to fp32", "[format][cpu]") {
  for (size_t i = 0; i < 16; ++i) {
    REQUIRE(kNf4CodeBook[i] == static_cast<float>(reference::kNf4[i]));
    REQUIRE(kFp4CodeBook[i] == static_cast<float>(reference::kFp4[i]));
    REQUIRE_FALSE(std::signbit(kFp4CodeBook[8]));
  }
}

TEST_CASE("every entry encodes to itself, and a midpoint to the entry below it", "[format][cpu]") {
  for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
    const CodeBook& book = code_book_of(type);
    for (size_t code = 0; code < 16; ++code) REQUIRE(book[encode_scaled(type, book[code])] == book[code]);
    for (size_t k = 0; k < 15; ++k) {
      const float tie = code_thresholds_of(type)[k];
      REQUIRE(encode_scaled(type, tie) == code_order_of(type)[k]);
      REQUIRE(encode_scaled(type, std::nextafter(tie, 2.0F)) == code_order_of(type)[k + 1]);
    }
    REQUIRE(encode_scaled(type, std::numeric_limits<float>::quiet_NaN()) == code_order_of(type)[15]);
  }
}

TEST_CASE("sizes are 64-bit and round up", "[format][cpu]") {
  REQUIRE(packed_bytes(0) == 0);
  REQUIRE(packed_bytes(3) == 2);
  REQUIRE(packed_bytes((int64_t{1} << 62) + 1) == (int64_t{1} << 61) + 1);
  REQUIRE(packed_bytes(std::numeric_limits<int64_t>::max()) == int64_t{1} << 62);
  REQUIRE(block_count(65, 64) == 2);
  REQUIRE(block_count(std::numeric_limits<int64_t>::max(), 4096) == int64_t{1} << 51);
  REQUIRE(is_block_size(32));
  REQUIRE_FALSE(is_block_size(16));
  REQUIRE_FALSE(is_block_size(8192));
  REQUIRE_FALSE(is_block_size(96));
}

TEST_CASE("codes pack with the even element above", "[format][cpu]") {
  REQUIRE(pack_codes(0xA, 0x3) == 0xA3);
  REQUIRE(even_code(0xA3) == 0xA);
  REQUIRE(odd_code(0xA3) == 0x3);
}

TEST_CASE("quant types have the peer's names and no others", "[format][cpu]") {
  REQUIRE(parse_quant_type(to_string(QuantType::kNf4), "x") == QuantType::kNf4);
  REQUIRE(parse_quant_type(to_string(QuantType::kFp4), "x") == QuantType::kFp4);
  REQUIRE_THROWS_AS(parse_quant_type("NF4", "x"), ValueError);
}

TEST_CASE("the signed map is symmetric but for its one, and both maps ascend", "[format][cpu]") {
  for (size_t i = 1; i < 256; ++i) {
    REQUIRE(kSignedDynamicMap[i] > kSignedDynamicMap[i - 1]);
    REQUIRE(kUnsignedDynamicMap[i] > kUnsignedDynamicMap[i - 1]);
  }
  for (size_t i = 0; i < 127; ++i) REQUIRE(kSignedDynamicMap[i] == -kSignedDynamicMap[254 - i]);
  REQUIRE(std::fabs(static_cast<double>(kSignedDynamicMap[0]) + 0.99296875) < 1e-6);
}

TEST_CASE("eight-bit codes of a range of blocks touch nothing else", "[format][cpu]") {
  const std::array<float, 10> x{1, -2, 3, 0, 0, 0, 5, 5, -5, 0.25F};
  std::array<uint8_t, 10> codes{};
  std::array<float, 4> absmax{-1, -1, -1, -1};
  encode_dynamic(DynamicRounding::kNearest, true, x.data(), 10, 3, 1, 3, codes.data(), absmax.data());
  REQUIRE(absmax == std::array<float, 4>{-1, 0, 5, -1});
  REQUIRE(codes == std::array<uint8_t, 10>{0, 0, 0, 127, 127, 127, 255, 255, 0, 0});
  encode_dynamic(DynamicRounding::kBnbCpu, true, x.data(), 10, 3, 1, 4, codes.data(), absmax.data());
  REQUIRE(codes == std::array<uint8_t, 10>{0, 0, 0, 0, 0, 0, 255, 255, 0, 255});
  REQUIRE(absmax == std::array<float, 4>{-1, 0, 5, 0.25F});
}
