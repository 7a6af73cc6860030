// SPDX-License-Identifier: Apache-2.0
/// The part of few_rows_kernel.hpp that all instruction sets share; included by each of them, in an unnamed namespace as
/// float_bits.hpp is.
///
/// A policy names its registers and what is done with them:
///     Element, Vector, kLanes       an element of x as it is multiplied; a register of kLanes of them
///     Sum, zero(), total(sum)       partial sums
///     add(sum, weights, x)          the multiplication
///     load(x)                       kLanes elements
///     convert(value)                an element of x
///     Levels(book, scale)           the 16 values of a block
///     odd(bytes, levels), even(…)   of kLanes bytes: the values of their low nibbles, of their high nibbles
///     widen(weights)                kLanes values of a dense weight
///     rows_at_once(tokens, dense)   rows of W that share a load of x
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "few_rows_kernel.hpp"
#include "float_bits.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// Rows of x that share a value of W. More are taken in turns.
constexpr int64_t kTile = 8;
/// Rows of W that share a load of x.
constexpr int kMostRows = 4;
/// How far ahead in each stream of W memory is fetched.
constexpr int64_t kAheadBytes = 2048;

template <class Policy>
struct FourBitRow {
  const uint8_t* packed;
  const float* scales;  ///< Of each unit.
  const float* book;

  struct Unit {
    const uint8_t* packed;
    typename Policy::Levels levels;

    [[gnu::always_inline]] void values(int64_t part, typename Policy::Vector& first, typename Policy::Vector& second) const {
      const auto bytes = Policy::bytes(packed + part * Policy::kLanes);
      first = Policy::odd(bytes, levels);
      second = Policy::even(bytes, levels);
    }
  };
  [[gnu::always_inline]] Unit unit(int64_t u) const {
    const uint8_t* const at = packed + u * (kFewRowsUnit / 2);
    _mm_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes, _MM_HINT_T0);
    return {at, typename Policy::Levels(book, scales[u])};
  }
};

template <class Policy>
struct DenseRow {
  const uint16_t* weights;

  struct Unit {
    const uint16_t* weights;

    [[gnu::always_inline]] void values(int64_t part, typename Policy::Vector& first, typename Policy::Vector& second) const {
      const uint16_t* const at = weights + part * 2 * Policy::kLanes;
      first = Policy::widen(at);
      second = Policy::widen(at + Policy::kLanes);
    }
  };
  [[gnu::always_inline]] Unit unit(int64_t u) const {
    const uint16_t* const at = weights + u * kFewRowsUnit;
    for (int64_t line = 0; line < kFewRowsUnit * 2; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes + line, _MM_HINT_T0);
    return {at};
  }
};

/// sums[m][r] of `tokens` rows of x and `rows` rows of W. Each has one register of partial sums, so the order of adding does not depend on the counts.
template <class Policy, class Row, int tokens, int rows>
[[gnu::noinline]] void products(const Row* row, const typename Policy::Element* x, int64_t units, float* sums) {
  using Vector = typename Policy::Vector;
  typename Policy::Sum sum[tokens][rows];
  for (auto& of_token : sum)
    for (auto& one : of_token) one = Policy::zero();
  for (int64_t u = 0; u < units; ++u, x += kFewRowsUnit * tokens) {
    typename Row::Unit unit[rows];
    for (int r = 0; r < rows; ++r) unit[r] = row[r].unit(u);
#pragma GCC unroll 4
    for (int64_t part = 0; part < kFewRowsUnit / (2 * Policy::kLanes); ++part) {
      Vector first[rows], second[rows];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) unit[r].values(part, first[r], second[r]);
#pragma GCC unroll 8
      for (int m = 0; m < tokens; ++m) {
        const auto* const at = x + m * kFewRowsUnit + part * 2 * Policy::kLanes;
        const Vector x_first = Policy::load(at), x_second = Policy::load(at + Policy::kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) sum[m][r] = Policy::add(Policy::add(sum[m][r], first[r], x_first), second[r], x_second);
      }
    }
  }
  for (int m = 0; m < tokens; ++m)
    for (int r = 0; r < rows; ++r) sums[m * rows + r] = Policy::total(sum[m][r]);
}

/// The scale of each unit of a row of W.
inline void unit_scales(const FewRows& work, int64_t row, float* scales) {
  const int64_t units = work.columns / kFewRowsUnit, block = work.four_bit.block_size;
  if (block == kFewRowsUnit) return block_scales(work.four_bit, row * units, units, scales);
  for (int64_t u = 0; u < units; ++u) {
    const int64_t first = row * work.columns + u * kFewRowsUnit;
    if (u > 0 && first % block != 0) scales[u] = scales[u - 1];
    else block_scales(work.four_bit, first / block, 1, scales + u);
  }
}

template <class T>
inline T rounded_to(float value) {
  if constexpr (std::is_same_v<T, Float16>) return to_float16(value);
  else if constexpr (std::is_same_v<T, BFloat16>) return to_bfloat16(value);
  else return value;
}

template <class Policy, class Row, class Value, int tokens>
void multiply_tile(const FewRows& work, int64_t tile, int64_t begin, int64_t end, float* scales) {
  constexpr int kRows = Policy::rows_at_once(tokens, std::is_same_v<Row, DenseRow<Policy>>);
  static_assert(kRows <= kMostRows);
  const int64_t units = work.columns / kFewRowsUnit;
  const auto* const x = static_cast<const typename Policy::Element*>(work.arranged) + tile * work.columns;
  Row row[kRows];
  float sums[tokens * kRows];
  // Rows that are taken together stand apart: each of them goes on where the one before it ended, in one stream of memory.
  const int64_t apart = (end - begin + kRows - 1) / kRows;
  for (int64_t first = begin; first < begin + apart; ++first) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t wanted = first + r * apart, at = wanted < end ? wanted : end - 1;  // too many repeat the last and are dropped
      if constexpr (std::is_same_v<Row, DenseRow<Policy>>) {
        row[r] = {work.dense + at * work.dense_stride};
      } else {
        float* const own = scales + r * units;
        unit_scales(work, at, own);
        row[r] = {work.four_bit.packed + at * work.columns / 2, own, four_bit_code_book(work.four_bit.quant_type)};
      }
    }
    products<Policy, Row, tokens, kRows>(row, x, units, sums);
    for (int m = 0; m < tokens; ++m) {
      auto* const y = static_cast<Value*>(work.y) + (tile + m) * work.y_stride;
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = first + r * apart;
        if (at >= end) break;
        const float sum = sums[m * kRows + r];
        y[at] = rounded_to<Value>(work.accumulate ? to_float(y[at]) + sum : sum);
      }
    }
  }
}

template <class Policy, class Row, class Value>
void multiply(const FewRows& work, int64_t begin, int64_t end) {
  float scales[kMostRows * kFewRowsColumns / kFewRowsUnit];
  // All rows of x take a few rows of W before the next ones: W's come out of the cache for the second tile.
  constexpr int64_t kBand = 8;
  const int64_t band = work.tokens > kTile ? kBand : end - begin;
  for (int64_t first = begin; first < end; first += band) {
    const int64_t last = first + band < end ? first + band : end;
    for (int64_t tile = 0; tile < work.tokens; tile += kTile) {
      switch (work.tokens - tile) {
        case 1:
          multiply_tile<Policy, Row, Value, 1>(work, tile, first, last, scales);
          break;
        case 2:
          multiply_tile<Policy, Row, Value, 2>(work, tile, first, last, scales);
          break;
        case 3:
          multiply_tile<Policy, Row, Value, 3>(work, tile, first, last, scales);
          break;
        case 4:
          multiply_tile<Policy, Row, Value, 4>(work, tile, first, last, scales);
          break;
        case 5:
          multiply_tile<Policy, Row, Value, 5>(work, tile, first, last, scales);
          break;
        case 6:
          multiply_tile<Policy, Row, Value, 6>(work, tile, first, last, scales);
          break;
        case 7:
          multiply_tile<Policy, Row, Value, 7>(work, tile, first, last, scales);
          break;
        default:
          multiply_tile<Policy, Row, Value, 8>(work, tile, first, last, scales);
      }
    }
  }
}

/// Units of a tile's rows one after the other. Beside four-bit weights the elements of odd index stand before those of even index,
/// kLanes of each: a byte's low nibble is the odd element, and taking the low nibbles of a register costs nothing.
template <class Policy, class Row, class Value>
void arrange(const FewRows& work) {
  constexpr int64_t kLanes = Policy::kLanes;
  auto* const arranged = static_cast<typename Policy::Element*>(work.arranged);
  for (int64_t m = 0; m < work.tokens; ++m) {
    const int64_t tile = m / kTile * kTile, in_tile = work.tokens - tile < kTile ? work.tokens - tile : kTile;
    const auto* from = static_cast<const Value*>(work.x) + m * work.x_stride;
    auto* to = arranged + tile * work.columns + (m - tile) * kFewRowsUnit;
    for (int64_t u = 0; u < work.columns / kFewRowsUnit; ++u, from += kFewRowsUnit, to += kFewRowsUnit * in_tile) {
      if constexpr (std::is_same_v<Row, DenseRow<Policy>>) {
        for (int64_t i = 0; i < kFewRowsUnit; ++i) to[i] = Policy::convert(from[i]);
      } else {
        for (int64_t i = 0; i < kFewRowsUnit; i += 2 * kLanes) {
          for (int64_t k = 0; k < kLanes; ++k) to[i + k] = Policy::convert(from[i + 2 * k + 1]);
          for (int64_t k = 0; k < kLanes; ++k) to[i + kLanes + k] = Policy::convert(from[i + 2 * k]);
        }
      }
    }
  }
}

template <class Policy, class Row, class Value>
constexpr FewRowsKernel kernel_of() {
  return {arrange<Policy, Row, Value>, multiply<Policy, Row, Value>};
}

}  // namespace
}  // namespace qlorapp::ops::cpu
