// SPDX-License-Identifier: Apache-2.0
/// Up to 128 rows of x (gemm_4bit_group.hpp) on sm_90a: as gemm_4bit_more.cu, on the tensor cores of a warpgroup (wgmma), which read x in shared
/// memory and W in registers.
///
/// One CTA stays on each multiprocessor and has an even part of all k of all strips of 256 rows of W, one after the other. A strip that has several
/// CTAs gets their sums from the kernel behind it, in their order. A warpgroup has 64 rows of the strip and up to 128 rows of x; one more copies what
/// the four multiply, and is a ring of stages ahead.
///
/// A warp's lane reads 16 codes that follow each other, of which a product of 16 k wants four: so x is laid down in that order of k. W is what a
/// dequantized weight has, scaled in fp32 and rounded once; the next 32 k (of many rows of x: 16) are formed while the tensor cores multiply the last.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "few_rows.cuh"
#include "warpgroup.cuh"
#include "wide_beside.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kWideWarps = 16, kWideThreads = 32 * kWideWarps, kCopyThreads = 128, kAllThreads = kWideThreads + kCopyThreads;
constexpr int kDeep = 128;  // k of a stage
constexpr int kDeepCodes = kHeight * kDeep / 2;
constexpr int kScales = kHeight * 16, kScaleRing = 3;
/// Slots of the ring lie in front of the table of values, behind scales and barriers, and behind it.
constexpr int kFront = kSystem + kScaleRing * kScales + 2048;
static_assert(kFront % 1024 == 0);

template <int kTokens>
struct Wide {
  static constexpr int kTile =
      kTokens * kBlock * 2;  ///< x of 64 k: of a row 128 bytes, whose pieces of 16 are exchanged by the row's last bits.
  static constexpr int kX = kDeep / kBlock * kTile, kBytesEach = kDeepCodes + kX;
  static constexpr int kRing = kTokens <= 32 ? 5 : kTokens <= 64 ? 4 : 3;
  static constexpr int kSlotsInFront = (kTable - kFront) / kBytesEach;
  static constexpr int kSteps = kTokens <= 64 ? 2 : 1;  ///< Of 16 k, whose W is formed at a time.
  static constexpr int kBytes = kTable + kWideTable + (kRing - kSlotsInFront) * kBytesEach - kSystem;
  static_assert(kBytes <= kMostShared && kSlotsInFront < kRing);
  static_assert(2 * kScaleRing > kRing);  // a unit's scales are replaced when its stages were read
  /// Registers of a thread that multiplies, and of one that copies; the launch gives each as many.
  static constexpr int kOfProducts = kTokens <= 64 ? 104 : 112, kOfCopies = kTokens <= 64 ? 56 : 32;
  static constexpr int kRegisters = kOfProducts * kWideThreads + kOfCopies * kCopyThreads;
  /// From the begin of dynamic shared memory.
  static __device__ __forceinline__ int place_of(int slot) {
    return slot < kSlotsInFront ? kFront - kSystem + slot * kBytesEach
                                : kTable + kWideTable - kSystem + (slot - kSlotsInFront) * kBytesEach;
  }
};

/// 16 bytes of what is read once: L2 keeps other things. @param to  in shared memory.
__device__ __forceinline__ void copy_once(bool wanted, uint32_t to, const void* from) {
  asm volatile(
      "{.reg .pred p; .reg .b64 once; setp.ne.b32 p, %2, 0; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
      "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, once;}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted)));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/// A thread's nested scales as they are stored: four codes of each of two rows.
struct NestedScales {
  uint32_t codes[2];
  float outer[2], offset;
};
__device__ __forceinline__ uint32_t first_block(const Work& work, const GroupWeight& weight, int64_t row, uint32_t in_strip) {
  return static_cast<uint32_t>(min(row, weight.n - 1) * (work.asked.k / kBlock)) + in_strip * (kUnit / kBlock);
}
__device__ __forceinline__ NestedScales nested_scales_of(const Work& work, const Extent& extent, uint32_t unit, uint32_t end,
                                                         int thread) {
  NestedScales found{};
  if (!work.nested || unit >= end) return found;
  const uint32_t strip = unit / extent.units;
  const int own = weight_of(work, strip);
  const GroupWeight& weight = work.asked.weights[own];
  const int64_t row0 = (static_cast<int64_t>(strip) - work.first_strip[own]) * kHeight + thread;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t block = first_block(work, weight, row0 + i * kCopyThreads, unit - strip * extent.units);
    found.codes[i] = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const unsigned char*>(weight.absmax) + block));
    found.outer[i] = __ldg(weight.nested_absmax + (block >> work.nested_block.shift));
  }
  found.offset = __ldg(weight.nested_offset);
  return found;
}

/// The copying warpgroup. It reads weights before earlier kernels have ended: the kernel in front has waited for those that could have written
/// them before it let this one begin. A thread has 16 bytes of every 32nd row of codes and the scales of every 128th row. Rows of codes that W has
/// not are left as they are: only results that are not stored depend on them.
/// @param arrivals  of each slot of the ring: it is full.  @param ends  it was read.
template <int kTokens>
__device__ __forceinline__ void copy_stages(const Work& work, const Extent& extent, uint32_t first, uint32_t end,
                                            unsigned char* shared, unsigned char* scale_ring, float* map, uint64_t* arrivals,
                                            uint64_t* ends) {
  using Shape = Wide<kTokens>;
  const int thread = static_cast<int>(threadIdx.x) - kWideThreads, own_row = thread / 4;
  const int64_t far_rows = work.asked.k / 2 * (kCopyThreads / 4);
  const uint32_t codes_to =
      shared_address(shared) +
      static_cast<uint32_t>(own_row * (kDeep / 2) + ((thread % 4 / 2) ^ (own_row / 2 % 2)) * 32 + thread % 2 * 16);
  const auto ask_x = [&](int slot, uint32_t deep) {  // a stage's number in its strip
    copy_bytes(shared + Shape::place_of(slot) + kDeepCodes, work.laid + static_cast<int64_t>(deep) * Shape::kX, Shape::kX,
               arrivals + slot);
  };
  NestedScales nested = nested_scales_of(work, extent, first, end, thread),
               later = nested_scales_of(work, extent, first + 1, end, thread);
  for (int i = thread; i < 256; i += kCopyThreads) map[i] = __ldg(kDeviceSignedMap.values + i);
  meet<kCopyThreads>(2);
  const int stages = static_cast<int>(end - first) * 2, early = min(stages, Shape::kRing);
  int stage = 0, slot = 0;
  uint32_t turn = 0;  // of the ring
  for (uint32_t unit = first; unit < end;) {
    const uint32_t strip = unit / extent.units;
    const uint32_t strip_end = min((strip + 1) * extent.units, end);
    const int own = weight_of(work, strip);
    const GroupWeight& weight = work.asked.weights[own];
    const int64_t row0 = (static_cast<int64_t>(strip) - work.first_strip[own]) * kHeight + own_row;
    const int rows = static_cast<int>(min(weight.n - row0, int64_t{kHeight}));
    const unsigned char* codes =
        weight.packed + row0 * (work.asked.k / 2) + (unit - strip * extent.units) * (kUnit / 2) + thread % 4 * 16;
    for (; unit < strip_end; ++unit) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half, codes += kDeep / 2) {
        if (stage >= Shape::kRing) wait_for_arrival(ends + slot, turn ^ 1U);
        const uint32_t to = codes_to + static_cast<uint32_t>(Shape::place_of(slot));
        const unsigned char* from = codes;
#pragma unroll
        for (int row = 0; row < kHeight; row += kCopyThreads / 4, from += far_rows)
          copy_once(row < rows, to + static_cast<uint32_t>(row * (kDeep / 2)), from);
        if (half == 0) {
          unsigned char* const scales = scale_ring + (unit - first) % kScaleRing * kScales + thread * 16;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (work.nested) {
              const auto decoded = [&](int byte) {
                return decode_scale_rn(map[(nested.codes[i] >> (8 * byte)) & 255U], nested.outer[i], nested.offset);
              };
              *reinterpret_cast<float4*>(scales + i * (kCopyThreads * 16)) =
                  make_float4(decoded(0), decoded(1), decoded(2), decoded(3));
            } else {
              const int64_t row = row0 - own_row + thread + i * kCopyThreads;
              copy_once(true, shared_address(scales) + i * (kCopyThreads * 16),
                        static_cast<const float*>(weight.absmax) + first_block(work, weight, row, unit - strip * extent.units));
            }
          }
          nested = later;
          later = nested_scales_of(work, extent, unit + 2, end, thread);
        }
        arrive_after_copies(arrivals + slot);
        arrive(arrivals + slot);
        if (stage >= early && thread == 0) ask_x(slot, (unit - strip * extent.units) * 2U + static_cast<uint32_t>(half));
        if (stage == early - 1) {
          wait_for_earlier_kernels();  // x is theirs
          if (thread == 0) {
#pragma unroll 1
            for (uint32_t i = 0; i < static_cast<uint32_t>(early); ++i)
              ask_x(static_cast<int>(i), (first + i / 2U) % extent.units * 2U + i % 2U);
          }
        }
        ++stage;
        slot = slot + 1 == Shape::kRing ? 0 : slot + 1;
        turn ^= slot == 0 ? 1U : 0U;
      }
    }
  }
  wait_for_copies();
}
#endif

/// Asks for the rows of B of the strips whose first part is this CTA's: add_adapter() reads them when it has waited for all else.
__device__ __forceinline__ void prefetch_b(const Work& work, const Extent& extent, uint32_t first, uint32_t end) {
  if (threadIdx.x >= kHeight) return;
  for (uint32_t strip = (first + extent.units - 1) / extent.units; strip * extent.units < end; ++strip) {
    const int own = weight_of(work, strip);
    const GroupWeight& weight = work.asked.weights[own];
    const int64_t row = (static_cast<int64_t>(strip) - work.first_strip[own]) * kHeight + threadIdx.x;
    if (weight.b == nullptr || row >= weight.n) continue;
    const auto* const b = static_cast<const unsigned char*>(weight.b) + row * weight.rank * 2;
    for (int64_t at = 0; at < weight.rank * 2; at += kLine) prefetch(b + at);
  }
}

/// sums += scaling · B·uᵀ of a warp's 16 rows of W: one more product.
/// @param pair_at  pair_at(from, r): elements r and r + 1 of a row of B or u, 0 from the rank on.
template <class T, int kTiles, class Pair>
__device__ __forceinline__ void add_adapter(const Work& work, const GroupWeight& weight, int64_t row, int t, int g,
                                            float (&sums)[kTiles][4], const Pair& pair_at) {
  constexpr int kAtOnce = kTiles < 4 ? kTiles : 4;  // tiles whose u nothing waits for
  const T* const b = static_cast<const T*>(weight.b) + min(row, weight.n - 1) * weight.rank;
  const T* const b_after = static_cast<const T*>(weight.b) + min(row + 8, weight.n - 1) * weight.rank;
  const T* const u = static_cast<const T*>(work.asked.u) + weight.u_column;
#pragma unroll 1
  for (int64_t r = t * 2; r < weight.rank + t * 2; r += 16) {
    auto m = static_cast<int>(work.asked.m), ranks = static_cast<int>(work.asked.ranks);
    asm volatile("" : "+r"(m), "+r"(ranks));  // else each tile's place is kept, and there are no registers for that
    const uint32_t of_b[4] = {pair_at(b, r), pair_at(b_after, r), pair_at(b, r + 8), pair_at(b_after, r + 8)};
#pragma unroll
    for (int first = 0; first < kTiles; first += kAtOnce) {
      uint32_t of_u[kAtOnce][2];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const T* const own = u + min((first + j) * 8 + g, m - 1) * ranks;
        of_u[j][0] = pair_at(own, r), of_u[j][1] = pair_at(own, r + 8);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float part[4] = {};
        multiply<T>(part, of_b[0], of_b[1], of_b[2], of_b[3], of_u[j][0], of_u[j][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[first + j][i] += part[i] * weight.scaling;
      }
    }
  }
}
template <class T, int kTiles>
__device__ __forceinline__ void add_adapter(const Work& work, const GroupWeight& weight, int64_t row, int t, int g,
                                            float (&sums)[kTiles][4]) {
  const auto rank = static_cast<int>(weight.rank);
  if (work.wide_ranks) {
    add_adapter<T>(work, weight, row, t, g, sums, [rank](const T* from, int64_t r) {
      const uint32_t words = *reinterpret_cast<const uint32_t*>(from + min(static_cast<int>(r), rank - 2));  // no branch
      return r < rank ? words : 0U;
    });
    return;
  }
  add_adapter<T>(work, weight, row, t, g, sums, [rank](const T* from, int64_t r) {
    const unsigned low = r < rank ? *reinterpret_cast<const unsigned short*>(from + r) : 0U;
    const unsigned high = r + 1 < rank ? *reinterpret_cast<const unsigned short*>(from + r + 1) : 0U;
    return low | (high << 16U);
  });
}

/// The values of one of a word's bytes.
__device__ __forceinline__ float2 values_of(uint32_t word, int byte, int lane) {
  float2 values;
  asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "r"(entry_of(word, byte, lane * 8)));
  return values;
}

template <class T, int kTokens>
__global__ void __launch_bounds__(kAllThreads, 1) wide_rows(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere it is never launched
  using Shape = Wide<kTokens>;
  constexpr int kTiles = kTokens / 8;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const scale_ring = shared;
  float* const map = reinterpret_cast<float*>(scale_ring + kScaleRing * kScales);
  auto* const arrivals = reinterpret_cast<uint64_t*>(map + 256);  // in each slot of the ring
  uint64_t* const ends = arrivals + Shape::kRing;                 // of what read it
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, g = lane / 4, t = lane % 4;
  const int row = thread / 32 * 16 + g;  // of the strip; the lane has that and the 8th after it
  const Extent extent(work, static_cast<unsigned>(work.splits));
  const uint32_t first = extent.first_of(blockIdx.x), end = extent.first_of(blockIdx.x + 1);
  require_place(shared);
  if (thread < Shape::kRing) {
    prepare_arrival(arrivals + thread, 2 * kCopyThreads + 1);  // each thread's copies, its scales, and x
    prepare_arrival(ends + thread, kWideWarps);
  }
  __syncthreads();
  if (thread >= kWideThreads) {
    keep_registers<Shape::kOfCopies>();
    copy_stages<kTokens>(work, extent, first, end, shared, scale_ring, map, arrivals, ends);
    return;
  }
  take_registers<Shape::kOfProducts>();
  prefetch_b(work, extent, first, end);
  fill_pairs<kEntry>(shared + kInFront, work.nf4, kWideThreads);
  meet<kWideThreads>(1);
  wait_for_earlier_kernels();

  float sums[kTiles][4] = {};
  uint32_t a[2][Shape::kSteps][4];  // of the last two parts, of each step: rows g and g + 8 at its first bytes, then at its others
  int slot = 0, last_slot = -1;
  uint32_t turn = 0;  // of the ring
  for (uint32_t unit = first; unit < end;) {
    const uint32_t strip = unit / extent.units;
    const uint32_t strip_end = min((strip + 1) * extent.units, end);
    const int own = weight_of(work, strip);
    const bool is_first = unit == strip * extent.units;
    for (; unit < strip_end; ++unit) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const unsigned char* const here = shared + Shape::place_of(slot);
        wait_for_arrival(arrivals + slot, turn);
        const auto* const own_scales =
            reinterpret_cast<const float2*>(scale_ring + (unit - first) % kScaleRing * kScales + row * 16 + half * 8);
        const float2 scales[2] = {own_scales[0], own_scales[16]};  // of the rows, of 64 k each
        uint2 codes[2];                                            // of 64 k, of each row
        float2 values[2][Shape::kSteps * 2];
        const auto look_up = [&](int part) {
#pragma unroll
          for (int i = 0; i < Shape::kSteps * 2; ++i) {
            const int pair = part * Shape::kSteps * 2 + i;  // of the 16 in 128 k
#pragma unroll
            for (int low = 0; low < 2; ++low) {
              if (pair % 8 == 0)
                codes[low] = *reinterpret_cast<const uint2*>(here + (row + low * 8) * (kDeep / 2) +
                                                             (pair / 8 ^ ((row >> 1) & 1)) * 32 + t * 8);
              values[low][i] = values_of(pair % 8 < 4 ? codes[low].x : codes[low].y, pair % 4, lane);
            }
          }
        };
        look_up(0);
#pragma unroll
        for (int part = 0; part < 8 / Shape::kSteps; ++part) {
          uint32_t(&own_a)[Shape::kSteps][4] = a[part % 2];
          wait_for_products<1>(own_a);  // of the part before the last, which read them
          if (part == 1 && last_slot >= 0 && lane == 0) arrive(ends + last_slot);
          const int block = part * Shape::kSteps / 4;
#pragma unroll
          for (int i = 0; i < Shape::kSteps * 2; ++i)
#pragma unroll
            for (int low = 0; low < 2; ++low) {
              const float scale = block == 0 ? scales[low].x : scales[low].y;
              own_a[i / 2][i % 2 * 2 + low] = pack_pair<T>(__fmul_rn(values[low][i].x, scale), __fmul_rn(values[low][i].y, scale));
            }
          if (part + 1 < 8 / Shape::kSteps) look_up(part + 1);
          const uint64_t x =
              matrix_of(here + kDeepCodes + block * Shape::kTile) + static_cast<uint64_t>(part * Shape::kSteps % 4) * 2U;
          begin_products(sums, own_a);
#pragma unroll
          for (int step = 0; step < Shape::kSteps; ++step)
            multiply_wide<T>(sums, own_a[step], x + static_cast<uint64_t>(step) * 2U);
          end_products();
        }
        last_slot = slot;
        slot = slot + 1 == Shape::kRing ? 0 : slot + 1;
        turn ^= slot == 0 ? 1U : 0U;
      }
    }
    wait_for_products<0>(sums);
    if (lane == 0) arrive(ends + last_slot);  // before the sums are stored, which takes time
    last_slot = -1;
    const GroupWeight& weight = work.asked.weights[own];
    // [part][token][row of all weights]
    const auto in_weight = static_cast<uint32_t>(strip - work.first_strip[own]) * kHeight + static_cast<uint32_t>(row);
    const auto width = static_cast<uint32_t>(work.first_row[work.asked.count]), m = static_cast<uint32_t>(work.asked.m);
    if (is_first && weight.b != nullptr) add_adapter<T>(work, weight, in_weight, t, g, sums);
    float* to = work.asked.partial + work.first_row[own] + in_weight +
                (static_cast<int64_t>(blockIdx.x - extent.first_part(strip)) * m + t * 2) * width;
    const int rows_left = static_cast<int>(weight.n - in_weight), tokens_left = static_cast<int>(m) - t * 2;
#pragma unroll
    for (int j = 0; j < kTiles; ++j, to += width * 8U)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i / 2 * 8 < rows_left && j * 8 + i % 2 < tokens_left) to[i / 2 * 8 + i % 2 * width] = sums[j][i];
        sums[j][i] = 0.0F;
      }
  }
#endif
}

/// The most parts that a strip has.
uint32_t most_parts(const Extent& extent) {
  uint32_t most = 1;
  for (uint32_t i = 0; i < extent.strips; ++i) most = std::max(most, extent.parts(i));
  return most;
}
template <class T, int kTokens>
cudaError_t launch_sums(const Work& work, bool is_laid, Stream stream) {
  static std::atomic<signed char> known[64];
  using Shape = Wide<kTokens>;
  const bool fits = once_a_device(known, [] {
    const auto kernel = wide_rows<T, kTokens>;
    cudaFuncAttributes has{};
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes) == cudaSuccess &&
           cudaFuncGetAttributes(&has, kernel) == cudaSuccess && has.numRegs * kAllThreads >= Shape::kRegisters;
  });
  if (!fits) return cudaErrorLaunchOutOfResources;
  const int64_t pieces = is_laid ? 0 : laid_bytes(kTokens, work.asked.k) / 16,
                of_x = (pieces + kBesideThreads - 1) / kBesideThreads;
  const int64_t of_u = tiles_of_u(work);
  if (of_u + of_x > 0) {
    const cudaError_t error =
        launch_early<prepare_wide<T, kTokens>>(dim3(static_cast<unsigned>(of_u + of_x)), kBesideThreads, 0, stream, work);
    if (error != cudaSuccess) return error;
  }
  const Extent extent(work, static_cast<unsigned>(work.splits));
  return launch_early<wide_rows<T, kTokens>>(dim3(extent.ctas), kAllThreads, Shape::kBytes, stream, work);
}

template <class T>
cudaError_t launch_rows(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  return with_tokens(asked.m, [&](auto tokens) {
    constexpr int kTokens = decltype(tokens)::value;
    Work work = work_of(asked, kHeight);
    work.splits = multiprocessors;
    work.laid = reinterpret_cast<unsigned char*>(asked.partial);
    work.asked.partial += laid_bytes(kTokens, work.asked.k) / 4;
    const cudaError_t error = launch_sums<T, kTokens>(work, /*is_laid=*/false, stream);
    return error == cudaSuccess ? launch_finish<T, kTokens>(work, stream) : error;
  });
}

}  // namespace

bool goes_wide(const GemmFourBitGroup& work) {
#ifdef QLORAPP_SM90A
  if (work.m <= kFewTokens || make_divisor(work.nested_block_size).shift < 0) return false;
  static std::atomic<signed char> known[64];
  return once_a_device(known, [] {
    int device = 0, major = 0, minor = 0, kept = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&kept, cudaDevAttrReservedSharedMemoryPerBlock, device) == cudaSuccess && major == 9 &&
           minor == 0 && kept == kSystem;
  });
#else  // built without code for sm_90
  static_cast<void>(work);
  return false;
#endif
}

int64_t wide_sums_floats(const GemmFourBitGroup& asked, int multiprocessors) {
  const Work work = work_of(asked, kHeight);
  return most_parts(Extent(work, static_cast<unsigned>(multiprocessors))) * asked.m * work.first_row[asked.count];
}

int64_t wide_rows_floats(const GemmFourBitGroup& asked, int multiprocessors) {
  return laid_bytes(tokens_of(asked.m), asked.k) / 4 + wide_sums_floats(asked, multiprocessors);
}

cudaError_t sum_wide_rows(const GemmFourBitGroup& asked, unsigned char* laid, bool is_laid, int multiprocessors, Stream stream) {
  Work work = work_of(asked, kHeight);
  work.splits = multiprocessors;
  work.laid = laid;
  return with_tokens(asked.m,
                     [&](auto tokens) { return launch_sums<__nv_bfloat16, decltype(tokens)::value>(work, is_laid, stream); });
}

cudaError_t multiply_wide_rows(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  return work.type == Float::kFloat16 ? launch_rows<__half>(work, multiprocessors, stream)
                                      : launch_rows<__nv_bfloat16>(work, multiprocessors, stream);
}

}  // namespace qlorapp::cuda
