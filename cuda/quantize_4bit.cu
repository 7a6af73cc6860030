// SPDX-License-Identifier: Apache-2.0
/// A warp takes 256 elements at a time, eight neighbors a lane: one 16-byte read, a maximum over the lanes of a block by
/// shuffles, one 4-byte write. Longer blocks are read twice, the second time from the caches.
///
/// A code is found without a search: [-1, 1] (for FP4 the magnitude, [0, 1]) is cut into 32 cells so narrow that none holds
/// two thresholds. Lane c keeps cell c: how many thresholds lie in lower cells, and the one that lies in this cell. Two
/// shuffles and one comparison decide, exactly as fifteen comparisons would: the cell is a monotone function of the number.
#include <algorithm>
#include <cstdint>

#include "code_books.cuh"
#include "element.cuh"
#include "fast_math.cuh"
#include "quantize_4bit.hpp"

namespace qlorapp::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kChunk = 8;
constexpr int kStep = 32 * kChunk;
constexpr float kMagic = 8388608.0F;  // 2^23: a sum's last bits are its integer part, rounded

struct Cells {
  float threshold[32];  // above every number where the cell has none
  uint32_t below[32];   // thresholds in lower cells
};
struct CellRule {
  float factor, shift;
};
constexpr CellRule kNf4Cell{15.0F, 16.0F + kMagic};  // -1 … 1 to 1 … 31
constexpr CellRule kFp4Cell{31.0F, kMagic};          // 0 … 1 to 0 … 31

/// fmaf(x, factor, shift) - kMagic for those numbers: the exact value lies between 0 and 31 and is rounded to even.
constexpr int cell_of(float x, CellRule rule) {
  const double exact = static_cast<double>(x) * static_cast<double>(rule.factor) + (static_cast<double>(rule.shift) - kMagic);
  const int floor = static_cast<int>(exact);
  const double rest = exact - floor;
  return floor + (rest > 0.5 || (rest == 0.5 && floor % 2 != 0) ? 1 : 0);
}

template <size_t kCount>
constexpr Cells make_cells(const float (&thresholds)[kCount], CellRule rule) {
  Cells cells{};
  for (int cell = 0; cell < 32; ++cell) {
    cells.threshold[cell] = 4.0F;
    for (const float threshold : thresholds) {
      if (cell_of(threshold, rule) < cell) ++cells.below[cell];
      if (cell_of(threshold, rule) == cell) cells.threshold[cell] = threshold;
    }
  }
  return cells;
}
template <size_t kCount>
constexpr bool one_a_cell(const float (&thresholds)[kCount], CellRule rule) {
  for (size_t i = 1; i < kCount; ++i)
    if (cell_of(thresholds[i], rule) <= cell_of(thresholds[i - 1], rule)) return false;
  return true;
}

struct Thresholds {
  float nf4[15];
  float fp4[7];
};
constexpr Thresholds make_thresholds() {
  Thresholds result{};
  for (size_t i = 0; i < 15; ++i) result.nf4[i] = kNf4Thresholds[i];
  for (size_t i = 0; i < 7; ++i) result.fp4[i] = kFp4Thresholds[8 + i];
  return result;
}
constexpr Thresholds kThresholds = make_thresholds();
/// bitsandbytes' CUDA kernels write them with fewer digits than its CPU build: four of NF4's and two of FP4's are a neighbor.
constexpr float kNf4BnbThresholds[15] = {-0.84809643F,  -0.610632896F,  -0.45999527F,  -0.33967942F, -0.234607399F,
                                         -0.137911737F, -0.0455250181F, 0.0397901498F, 0.120255254F, 0.203521252F,
                                         0.292013764F,  0.389312536F,   0.501663387F,  0.64278692F,  0.861478388F};
constexpr float kFp4BnbThresholds[7] = {0.00260417F, 0.0859375F, 0.20833333F, 0.29166667F, 0.4166667F, 0.583333F, 0.8333333F};

static_assert(kNf4Cell.shift - kMagic == 16.0F);
static_assert(one_a_cell(kThresholds.nf4, kNf4Cell) && one_a_cell(kThresholds.fp4, kFp4Cell) &&
              one_a_cell(kNf4BnbThresholds, kNf4Cell) && one_a_cell(kFp4BnbThresholds, kFp4Cell));
__device__ const Cells kNf4Cells = make_cells(kThresholds.nf4, kNf4Cell);
__device__ const Cells kNf4BnbCells = make_cells(kNf4BnbThresholds, kNf4Cell);
__device__ const Cells kFp4Cells = make_cells(kThresholds.fp4, kFp4Cell);
__device__ const Cells kFp4BnbCells = make_cells(kFp4BnbThresholds, kFp4Cell);

/// FP4's codes by magnitude, four bits each, the smallest last.
constexpr uint32_t kFp4ByMagnitude = 0x32547610U;
static_assert(kFp4Order[9] == 1 && kFp4Order[10] == 6 && kFp4Order[11] == 7 && kFp4Order[12] == 4 && kFp4Order[13] == 5 &&
              kFp4Order[14] == 2 && kFp4Order[15] == 3);

template <bool kNf4, bool kBnb>
struct Encoder {
  float threshold;
  uint32_t below;

  __device__ explicit Encoder(int lane) {
    const Cells& cells = kNf4 ? (kBnb ? kNf4BnbCells : kNf4Cells) : (kBnb ? kFp4BnbCells : kFp4Cells);
    threshold = __ldg(cells.threshold + lane);
    below = __ldg(cells.below + lane);
  }

  /// Every lane of the warp calls it.
  __device__ __forceinline__ uint32_t code(float scaled) const {
    const float place =
        kNf4 ? __fmaf_rn(scaled, kNf4Cell.factor, kNf4Cell.shift) : __fmaf_rn(fabsf(scaled), kFp4Cell.factor, kFp4Cell.shift);
    const int cell = __float_as_int(place);  // the lane index takes the last five bits
    const float limit = __shfl_sync(kAllLanes, threshold, cell);
    const uint32_t rank = __shfl_sync(kAllLanes, below, cell);
    if (kNf4) {
      const uint32_t result = rank + (scaled > limit ? 1U : 0U);
      return kBnb && scaled != scaled ? 0U : result;
    }
    const float magnitude = fabsf(scaled);
    if (kBnb) {
      const uint32_t at = rank + (magnitude > limit ? 1U : 0U);
      const uint32_t result = ((kFp4ByMagnitude >> (4U * at)) & 15U) | (scaled < 0.0F ? 8U : 0U);
      return scaled != scaled ? 0U : result;
    }
    // Ties go to the lower entry, which below zero is the larger magnitude; of the two zeros 8 is the upper one.
    const bool positive = scaled > 0.0F;
    const bool above = positive ? magnitude > limit : magnitude >= limit;
    const uint32_t at = rank + (above ? 1U : 0U);
    const uint32_t sign = positive == (at == 0U) ? 8U : 0U;
    return ((kFp4ByMagnitude >> (4U * at)) & 15U) | sign;
  }
};

constexpr uint32_t kInfinityBits = 0x7F800000U;

/// The largest magnitude of a block, gathered lane by lane: of kExact as bits, where NaN is above infinity.
template <bool kBnb>
struct Largest {
  uint32_t bits = kBnb ? 0xFF7FFFFFU : 0U;  // -FLT_MAX, as bitsandbytes begins

  __device__ __forceinline__ void take(float x) {
    if (kBnb) bits = __float_as_uint(fast_max(__uint_as_float(bits), fabsf(x)));
    else bits = max(bits, __float_as_uint(x) & 0x7FFFFFFFU);
  }
  __device__ __forceinline__ void gather(int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, bits, distance);
      if (kBnb) bits = __float_as_uint(fast_max(__uint_as_float(bits), __uint_as_float(other)));
      else bits = max(bits, other);
    }
  }
};

struct Work {
  const void* weight;
  int64_t n;
  int64_t block_size;
  int64_t units;  // of a warp: kStep elements, or a block where that is longer
  uint8_t* packed;
  float* absmax;
  unsigned long long* first_bad_block;
  int block_shift;
  bool vector_reads, word_writes;
};

template <class T>
__device__ __forceinline__ void read_chunk(const Work& work, int64_t at, float (&x)[kChunk]) {
  const T* const weight = static_cast<const T*>(work.weight);
  if (work.vector_reads && at + kChunk <= work.n) {
    load_eight(weight + at, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = at + i < work.n ? to_float(weight[at + i]) : 0.0F;
}

/// What scales a block's elements, and its stored scale.
template <bool kBnb>
struct Scale {
  float factor, divisor;
  bool divides;

  __device__ Scale(const Work& work, uint32_t largest, int64_t block, bool writes) {
    const float absmax = __uint_as_float(largest);
    const bool full = (block + 1) * work.block_size <= work.n;
    divides = false;
    divisor = absmax;
    float stored = absmax;
    if (kBnb) {
      factor = fast_reciprocal(absmax);
    } else {
      divisor = absmax < kSmallestDivisor ? kSmallestDivisor : absmax;
      factor = __frcp_rn(divisor);
      divides = !full;
      if (!full && absmax != 0.0F) stored = divisor;
      if (writes && largest >= kInfinityBits && work.first_bad_block != nullptr)
        atomicMin(work.first_bad_block, static_cast<unsigned long long>(block));
    }
    if (writes) work.absmax[block] = stored;
  }
  __device__ __forceinline__ void apply(const float (&x)[kChunk], float (&scaled)[kChunk]) const {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) scaled[i] = kBnb ? fast_product(x[i], factor) : __fmul_rn(x[i], factor);
    if constexpr (!kBnb) {
      if (!divides) return;
#pragma unroll 1
      for (int i = 0; i < kChunk; ++i) {  // rare: one division in the code instead of eight
        float quotient = 0.0F;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) quotient = i == j ? x[j] : quotient;
        quotient = __fdiv_rn(quotient, divisor);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) scaled[j] = i == j ? quotient : scaled[j];
      }
    }
  }
};

template <bool kNf4, bool kBnb>
__device__ __forceinline__ void write_chunk(const Work& work, int64_t at, const float (&x)[kChunk], const Scale<kBnb>& scale,
                                            const Encoder<kNf4, kBnb>& encoder) {
  float scaled[kChunk];
  scale.apply(x, scaled);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) word |= encoder.code(scaled[i]) << (4 * (i ^ 1));
  if (work.word_writes && at + kChunk <= work.n) {
    *reinterpret_cast<uint32_t*>(work.packed + at / 2) = word;
    return;
  }
  for (int byte = 0; byte < kChunk / 2; ++byte)
    if (at + 2 * byte < work.n) work.packed[at / 2 + byte] = static_cast<uint8_t>(word >> (8 * byte));
}

/// Blocks of up to 256 elements: kUnroll times 256 elements a warp.
template <class T, bool kNf4, bool kBnb>
__global__ void __launch_bounds__(256) quantize_short_blocks(const __grid_constant__ Work work) {
  constexpr int kUnroll = 4;
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32U) + threadIdx.x / 32U;
  if (warp * kUnroll >= work.units) return;
  const int lanes = static_cast<int>(work.block_size) / kChunk;  // of a block
  const Encoder<kNf4, kBnb> encoder(lane);
  float x[kUnroll][kChunk];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) read_chunk<T>(work, (warp * kUnroll + i) * kStep + lane * kChunk, x[i]);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = (warp * kUnroll + i) * kStep + lane * kChunk;
    Largest<kBnb> largest;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) largest.take(x[i][j]);
    largest.gather(lanes);
    const int64_t block = at >> work.block_shift;
    const Scale<kBnb> scale(work, largest.bits, block, at < work.n && lane % lanes == 0);
    write_chunk(work, at, x[i], scale, encoder);
  }
}

/// Blocks of 512 elements and more, one a warp.
template <class T, bool kNf4, bool kBnb>
__global__ void __launch_bounds__(256) quantize_long_blocks(const __grid_constant__ Work work) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32U) + threadIdx.x / 32U;
  if (block >= work.units) return;
  const Encoder<kNf4, kBnb> encoder(lane);
  const int64_t begin = block * work.block_size + lane * kChunk;
  Largest<kBnb> largest;
  float x[kChunk];
  for (int64_t step = 0; step < work.block_size; step += kStep) {
    read_chunk<T>(work, begin + step, x);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) largest.take(x[j]);
  }
  largest.gather(32);
  const Scale<kBnb> scale(work, largest.bits, block, lane == 0);
  for (int64_t step = 0; step < work.block_size; step += kStep) {
    read_chunk<T>(work, begin + step, x);
    write_chunk(work, begin + step, x, scale, encoder);
  }
}

template <class T, bool kNf4, bool kBnb>
cudaError_t launch(Work work, Stream stream) {
  constexpr int kThreads = 256;
  constexpr int64_t kWarps = kThreads / 32;
  if (work.block_size <= kStep) {
    work.units = (work.n + kStep - 1) / kStep;
    const int64_t warps = (work.units + 3) / 4;
    quantize_short_blocks<T, kNf4, kBnb><<<static_cast<unsigned>((warps + kWarps - 1) / kWarps), kThreads, 0, stream>>>(work);
  } else {
    work.units = block_count(work.n, work.block_size);
    quantize_long_blocks<T, kNf4, kBnb><<<static_cast<unsigned>((work.units + kWarps - 1) / kWarps), kThreads, 0, stream>>>(work);
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Work& work, QuantType type, bool bnb, Stream stream) {
  if (type == QuantType::kNf4) return bnb ? launch<T, true, true>(work, stream) : launch<T, true, false>(work, stream);
  return bnb ? launch<T, false, true>(work, stream) : launch<T, false, false>(work, stream);
}

}  // namespace

cudaError_t quantize_4bit(const QuantizeFourBit& asked, Stream stream) {
  if (asked.n == 0) return cudaSuccess;
  const Work work{asked.weight,
                  asked.n,
                  asked.block_size,
                  0,
                  asked.packed,
                  asked.absmax,
                  asked.first_bad_block,
                  make_divisor(asked.block_size).shift,
                  aligned_to(asked.weight, 16),
                  aligned_to(asked.packed, 4)};
  const bool bnb = asked.rounding == FourBitRounding::kBnbCuda;
  switch (asked.type) {
    case Float::kFloat32:
      return launch_type<float>(work, asked.quant_type, bnb, stream);
    case Float::kFloat16:
      return launch_type<__half>(work, asked.quant_type, bnb, stream);
    case Float::kBFloat16:
      return launch_type<__nv_bfloat16>(work, asked.quant_type, bnb, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace qlorapp::cuda
