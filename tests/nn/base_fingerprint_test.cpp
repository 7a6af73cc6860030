// SPDX-License-Identifier: Apache-2.0
// The sum over a tensor's bytes that tells frozen bases apart.
#include "nn/base_fingerprint.hpp"

#include <ATen/ATen.h>

#include "catch.hpp"

using namespace qlorapp;

namespace {

at::Tensor noise(int64_t bytes) { return at::randint(0, 256, {bytes}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

TEST_CASE("a host adds up the same number as a device does by operators", "[nn][cpu]") {
  at::manual_seed(1);
  for (const int64_t bytes : {0, 1, 7, 8, 9, 4096, 65537, (1 << 25) + 24}) {
    const at::Tensor tensor = noise(bytes);
    INFO(bytes << " bytes");
    REQUIRE(byte_sum(tensor) == byte_sum(tensor, /*by_operators=*/true));
  }
}

TEST_CASE("each bit counts, also of a tensor of several MiB", "[nn][cpu]") {
  at::manual_seed(2);
  const at::Tensor tensor = noise(3 << 20);
  const uint64_t whole = byte_sum(tensor);
  auto* const data = tensor.mutable_data_ptr<uint8_t>();
  for (int i = 0; i < 400; ++i) {
    const auto at = static_cast<int64_t>((static_cast<uint64_t>(i) * 2654435761U) % (3U << 20U));
    data[at] = static_cast<uint8_t>(data[at] ^ (1U << (i % 8)));
    REQUIRE(byte_sum(tensor) != whole);
    data[at] = static_cast<uint8_t>(data[at] ^ (1U << (i % 8)));
  }
  REQUIRE(byte_sum(tensor) == whole);
}

TEST_CASE("changes of several weights do not cancel out", "[nn][cpu]") {
  // A plain product moves a flip of the highest bit to one place: two such flips canceled in half of all cases.
  at::manual_seed(3);
  const at::Tensor tensor = noise(4096);
  const uint64_t whole = byte_sum(tensor);
  auto* const words = tensor.view(at::kLong).mutable_data_ptr<int64_t>();
  for (const int bit : {63, 62, 31, 0}) {
    const auto flip = static_cast<int64_t>(uint64_t{1} << static_cast<unsigned>(bit));
    for (int64_t a = 0; a < 40; ++a) {
      for (int64_t b = a + 1; b < 40; ++b) {
        words[a] ^= flip;
        words[b] ^= flip;
        REQUIRE(byte_sum(tensor) != whole);
        words[a] ^= flip;
        words[b] ^= flip;
      }
    }
  }
}
