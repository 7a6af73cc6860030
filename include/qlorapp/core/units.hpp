// SPDX-License-Identifier: Apache-2.0
/// Byte counts with a name, so that no raw integer of bytes crosses an interface.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace qlorapp {

/// A number of bytes. Signed, because differences of two counts are counts too.
struct Bytes {
  int64_t count = 0;

  constexpr Bytes& operator+=(Bytes other) {
    count += other.count;
    return *this;
  }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return {a.count - b.count}; }
  friend constexpr Bytes operator*(Bytes a, int64_t n) { return {a.count * n}; }
  friend constexpr auto operator<=>(Bytes, Bytes) = default;
};

namespace literals {
constexpr Bytes operator""_KiB(unsigned long long n) { return {static_cast<int64_t>(n << 10)}; }
constexpr Bytes operator""_MiB(unsigned long long n) { return {static_cast<int64_t>(n << 20)}; }
constexpr Bytes operator""_GiB(unsigned long long n) { return {static_cast<int64_t>(n << 30)}; }
}  // namespace literals

/// @returns e.g. "512 B", "1.5 KiB", "13.3 MiB", "5.31 GiB": three significant digits, binary units.
[[nodiscard]] std::string to_string(Bytes bytes);

}  // namespace qlorapp
