// SPDX-License-Identifier: Apache-2.0
/// Checksums of files: CRC-32C says which part of a file is damaged, SHA-256 that a file is the one that was written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace qlorapp::files {

/// @param crc  of the bytes before these, 0 for none.
/// Source: RFC 3720, appendix B.4 (Castagnoli's polynomial 0x1EDC6F41, reflected).
[[nodiscard]] uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

/// Source: FIPS 180-4.
class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  /// 64 hexadecimal digits. Call once.
  [[nodiscard]] std::string digest();

 private:
  void compress(const std::byte* blocks, size_t count);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_{};
  uint64_t length_ = 0;  // bytes
};

}  // namespace qlorapp::files
