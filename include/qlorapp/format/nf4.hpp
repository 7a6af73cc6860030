// SPDX-License-Identifier: Apache-2.0
/// The four-bit code books and their byte layout. Torch-free; constexpr.
#pragma once

#include <cstdint>

namespace qlorapp {

/// Which 16 values a four-bit code can mean.
enum class QuantType : uint8_t {
  kNf4,  ///< Quantiles of a normal distribution, with an exact zero.
  kFp4,  ///< Sign, two exponent bits, one mantissa bit.
};

}  // namespace qlorapp
