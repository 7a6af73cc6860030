// SPDX-License-Identifier: Apache-2.0
/// Device memory for kernels under test: exactly as large as its matrix, so that compute-sanitizer sees the first access behind
/// it.
///
/// What a kernel does not have to write holds a pattern, and wrote_only_its_rows() finds it again. With
/// QLORAPP_TEST_UNINITIALIZED=1, for initcheck, results begin uninitialized instead, and nothing is looked at.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "catch.hpp"
#include "cuda/types.hpp"

namespace kernels {

using qlorapp::cuda::Float;

inline bool no_gpu() {
  int count = 0;
  const bool none = cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
  if (none) {
    static_cast<void>(cudaGetLastError());
    WARN("skipped: there is no GPU");
  }
  return none;
}

inline bool uninitialized() {
  const char* const asked = std::getenv("QLORAPP_TEST_UNINITIALIZED");
  return asked != nullptr && *asked == '1';
}

/// A launch, which a stream may be recording.
inline void check_launch(cudaError_t launched) { REQUIRE(cudaGetErrorString(launched) == std::string("no error")); }

/// A launch and all that it did.
inline void check(cudaError_t launched) {
  check_launch(launched);
  check_launch(cudaDeviceSynchronize());
}

/// That a CTA can have.
inline int shared_bytes() {
  int count = 0;
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  return count;
}
/// That the system keeps of it.
inline int reserved_bytes() {
  int count = 0;
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrReservedSharedMemoryPerBlock, 0));
  return count;
}
inline int multiprocessors() {
  int count = 0;
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

constexpr unsigned char kPattern = 0xA5;

class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    check(cudaMalloc(&data_, bytes_ > 0 ? bytes_ : 1));
    if (!uninitialized()) check(cudaMemset(data_, kPattern, bytes_));
  }
  template <class T>
  explicit Memory(const std::vector<T>& values) : Memory(static_cast<int64_t>(values.size() * sizeof(T))) {
    if (bytes_ > 0) check(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  template <class T = void>
  [[nodiscard]] T* at(int64_t byte = 0) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(data_) + byte);
  }
  [[nodiscard]] std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> host(bytes_);
    if (bytes_ > 0) check(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

inline int64_t size_of(Float type) { return type == Float::kFloat32 ? 4 : 2; }

/// n finite numbers between −2 and 2, a few of them zero.
inline std::vector<unsigned char> numbers(Float type, int64_t n) {
  constexpr std::array<float, 8> kFloats{1.0F, -0.5F, 0.25F, 2.0F, 0.0F, -1.75F, 0.125F, -0.0625F};
  constexpr std::array<uint16_t, 8> kHalves{0x3C00, 0xB800, 0x3400, 0x4000, 0x0000, 0xBF00, 0x3000, 0xAC00};
  std::vector<unsigned char> bytes(static_cast<size_t>(n * size_of(type)));
  uint32_t state = 12345;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525 + 1013904223;
    const size_t which = state >> 29;
    uint32_t bits = 0;
    std::memcpy(&bits, &kFloats[which], 4);
    if (type == Float::kFloat16) bits = kHalves[which];
    if (type == Float::kBFloat16) bits >>= 16;
    std::memcpy(bytes.data() + i * size_of(type), &bits, static_cast<size_t>(size_of(type)));
  }
  return bytes;
}

/// Bytes of all values.
inline std::vector<uint8_t> codes(int64_t n) {
  std::vector<uint8_t> all(static_cast<size_t>(n));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i * 37 + 11);
  return all;
}

/// The numbers that these bytes are.
inline std::vector<double> widened(Float type, const std::vector<unsigned char>& bytes) {
  const auto size = static_cast<size_t>(size_of(type));
  std::vector<double> values(bytes.size() / size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * size, size);
    if (type == Float::kFloat16) {
      const int exponent = static_cast<int>(bits >> 10U & 31U), fraction = static_cast<int>(bits & 1023U);
      const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      values[i] = (bits & 0x8000U) != 0 ? -magnitude : magnitude;
    } else {
      values[i] = std::bit_cast<float>(type == Float::kBFloat16 ? bits << 16U : bits);
    }
  }
  return values;
}

/// Rows `width + spare` elements apart that begin `offset` elements into their memory, which ends with the last row's last
/// element.
struct Layout {
  int64_t offset, spare;
};

class Matrix {
 public:
  /// @param filled  with numbers; else a result.
  Matrix(Float type, int64_t rows, int64_t width, const Layout& layout, bool filled)
      : type_(type),
        rows_(rows),
        width_(width),
        layout_(layout),
        memory_(filled ? Memory(numbers(type, elements())) : Memory(elements() * size_of(type))) {}

  [[nodiscard]] void* data() const { return memory_.at<void>(layout_.offset * size_of(type_)); }
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data());
  }
  [[nodiscard]] int64_t stride() const { return width_ + layout_.spare; }

  /// As they are now, from the first row's first on, with what lies between rows.
  [[nodiscard]] std::vector<double> values() const {
    std::vector<double> all = widened(type_, memory_.bytes());
    all.erase(all.begin(), all.begin() + layout_.offset);
    return all;
  }

  /// Of a result: what lies before, between and behind the rows is untouched. (Nothing lies behind the last.)
  [[nodiscard]] bool wrote_only_its_rows() const {
    if (uninitialized()) return true;
    const std::vector<unsigned char> bytes = memory_.bytes();
    const int64_t size = size_of(type_);
    for (int64_t i = 0; i < std::ssize(bytes); ++i) {
      const int64_t element = i / size - layout_.offset;
      const bool inside = element >= 0 && element % stride() < width_;
      if (!inside && bytes[static_cast<size_t>(i)] != kPattern) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] int64_t elements() const { return rows_ == 0 ? layout_.offset : layout_.offset + (rows_ - 1) * stride() + width_; }

  Float type_;
  int64_t rows_, width_;
  Layout layout_;
  Memory memory_;
};

inline const std::vector<Float>& types() {
  static const std::vector<Float> all{Float::kFloat32, Float::kFloat16, Float::kBFloat16};
  return all;
}
/// Dense; aligned rows apart; rows at odd distances; a first row that is not aligned.
inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{{0, 0}, {0, 64}, {0, 3}, {1, 0}, {1, 8}};
  return all;
}

}  // namespace kernels
