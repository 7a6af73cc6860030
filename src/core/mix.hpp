// SPDX-License-Identifier: Apache-2.0
/// The mixing step of our fingerprints: a bijection of 64 bits.
#pragma once

#include <cstdint>

namespace qlorapp {

// Odd, so that multiplying by them is a bijection. Source: Steele, Lea, Flood 2014 (OOPSLA), SplitMix64.
inline constexpr uint64_t kMixPosition = 0x9e3779b97f4a7c15, kMixFirst = 0xbf58476d1ce4e5b9, kMixSecond = 0x94d049bb133111eb;

/// Every bit of the word reaches every bit of the result: in a sum of mixed words two changes do not cancel out.
constexpr uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * kMixFirst;
  word = (word ^ (word >> 27)) * kMixSecond;
  return word ^ (word >> 31);
}

}  // namespace qlorapp
