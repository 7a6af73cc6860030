// SPDX-License-Identifier: Apache-2.0
/// A warp expands a tile of 2,048 elements. A lane reads 4 bytes of codes at a time, its neighbors the bytes beside them, so
/// that reads (128 bytes) and 16-byte writes (512 bytes) of the warp are both contiguous; all its reads are in flight before
/// the first is used. The 16 values of the book lie in the lanes and are fetched by shuffles; a lane decodes one scale of the
/// tile, which the others fetch likewise. No shared memory, no barrier.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "code_books.cuh"
#include "dequantize_4bit.hpp"
#include "dequantize_blocks.hpp"
#include "early_launch.cuh"
#include "element.cuh"
#include "lora_augment.cuh"

namespace qlorapp::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kChunk = 8;           // elements of a lane at a time
constexpr int kStep = 32 * kChunk;  // elements of a warp at a time

struct Segment {
  const uint8_t* packed;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_offset;
  int64_t count;  // elements
  int64_t first_tile;
  int64_t first_row;
};

struct Work {
  Segment segments[kMaxFourBitSegments];
  int64_t tiles;
  int64_t columns;
  int64_t row_stride;
  void* out;
  Divisor nested_block;
  int segment_count;
  int block_shift;
  bool nf4;
  unsigned weight_blocks;  // of threads; those behind them write the borders
  Augmentation borders;
};

/// A thread of a block behind those of the weights writes eight neighbors of a border.
template <class T>
__device__ void write_borders(const Work& work) {
  const Augmentation& borders = work.borders;
  const int across = borders.spare / kChunk, along = borders.in / kChunk;
  const int i = static_cast<int>((blockIdx.x - work.weight_blocks) * blockDim.x + threadIdx.x);
  const int right = borders.out * across;
  float values[kChunk];
  T* const out = static_cast<T*>(work.out);
  if (i < right) {
    const int row = i / across, rank = (i - row * across) * kChunk;
    border_at_the_right(borders, row, rank, values);
    store_eight<false>(out + row * work.row_stride + borders.in + rank, values);
  } else if (i - right < borders.spare * along) {
    const int rank = (i - right) / along, column = (i - right - rank * along) * kChunk;
    border_below(borders, rank, column, values);
    store_eight<false>(out + (int64_t{borders.out} + rank) * work.row_stride + column, values);
  }
}

__device__ __forceinline__ float scale_of(const Segment& segment, int64_t block, Divisor nested_block, bool nested) {
  if (!nested) return __ldg(static_cast<const float*>(segment.absmax) + block);
  const uint8_t code = __ldg(static_cast<const uint8_t*>(segment.absmax) + block);
  const float nested_absmax = __ldg(segment.nested_absmax + divide(block, nested_block));
  return decode_scale_rn(__ldg(kDeviceSignedMap.values + code), nested_absmax, __ldg(segment.nested_offset));
}

/// @tparam kSteps     of kStep elements, make a tile.
/// @tparam kSubBlock  64, or 32 where blocks are that short: elements that surely share a scale.
/// @tparam kRows      output rows are apart: `row_stride` is not `columns`.
/// @tparam kStream    the output is larger than L2 holds: its lines are the first to leave.
template <class T, int kSteps, int kSubBlock, bool kNested, bool kRows, bool kStream>
__global__ void __launch_bounds__(128) expand_tiles(const __grid_constant__ Work work) {
  constexpr int kTile = kSteps * kStep;
  constexpr int kScales = kTile / kSubBlock / 32;      // of a lane
  constexpr int kStepScales = kStep / kSubBlock;       // 4 or 8
  constexpr int kLaneShift = kSubBlock == 64 ? 3 : 2;  // lanes that share a scale
  wait_for_earlier_kernels();
  if (kRows && blockIdx.x >= work.weight_blocks) return write_borders<T>(work);
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32U) + threadIdx.x / 32U;
  if (tile >= work.tiles) return;
  int index = 0;
#pragma unroll
  for (int i = 1; i < kMaxFourBitSegments; ++i)
    if (i < work.segment_count && tile >= work.segments[i].first_tile) index = i;
  const Segment& segment = work.segments[index];
  const int64_t begin = (tile - segment.first_tile) * kTile;
  const int64_t rest = segment.count - begin;  // of the segment, from here
  const bool full = rest >= kTile;
  const int limit = full ? kTile : static_cast<int>(rest);

  const uint8_t* const packed = segment.packed + begin / 2;
  uint32_t words[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = step * kStep + lane * kChunk;
    words[step] = 0;
    if (full || at + kChunk <= limit) {
      words[step] = read_once(reinterpret_cast<const uint32_t*>(packed) + at / kChunk);
    } else {
      for (int byte = 0; byte < 4; ++byte)
        if (at + 2 * byte < limit) words[step] |= static_cast<uint32_t>(packed[at / 2 + byte]) << (8 * byte);
    }
  }
  float scales[kScales];
#pragma unroll
  for (int i = 0; i < kScales; ++i) {
    const int64_t element = begin + (i * 32 + lane) * kSubBlock;
    const int64_t inside = element < segment.count ? element : segment.count - 1;
    scales[i] = scale_of(segment, inside >> work.block_shift, work.nested_block, kNested);
  }
  const float book = __ldg((work.nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15));

  int64_t row = 0;
  int64_t column = begin;
  if (kRows) {
    row = begin / work.columns;
    column = begin - row * work.columns;
  }
  T* const out = static_cast<T*>(work.out) + segment.first_row * work.row_stride;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float scale = __shfl_sync(kAllLanes, scales[step * kStepScales / 32], step * kStepScales % 32 + (lane >> kLaneShift));
    float values[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t code = words[step] >> (4 * (i ^ 1));  // the high nibble first; the lane index takes five bits of it,
      values[i] = __fmul_rn(__shfl_sync(kAllLanes, book, static_cast<int>(code)), scale);  // and lanes 16 apart are alike
    }
    const int at = step * kStep + lane * kChunk;
    int64_t place = column + at;
    if (kRows) {
      // 32 bits suffice: the launch sees to it that columns + a tile stay below 2^31.
      const unsigned across = static_cast<unsigned>(column) + static_cast<unsigned>(at);
      const unsigned columns = static_cast<unsigned>(work.columns);
      unsigned down = 0;
      if (across >= columns) down = columns >= kTile ? 1U : across / columns;
      place = (row + down) * work.row_stride + (across - down * columns);
    }
    if (full || at + kChunk <= limit) {
      store_eight<kStream>(out + place, values);
    } else {
      for (int i = 0; i < kChunk; ++i)
        if (at + i < limit) out[place + i] = from_float<T>(values[i]);
    }
  }
}

/// Any alignment, one element at a time.
template <class T, bool kNested>
__global__ void expand_elements(const __grid_constant__ Work work, int index) {
  const Segment& segment = work.segments[index];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  T* const out = static_cast<T*>(work.out);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < segment.count; i += stride) {
    const uint8_t byte = segment.packed[i / 2];
    const unsigned code = i % 2 == 0 ? byte >> 4U : byte & 15U;
    const float scale = scale_of(segment, i >> work.block_shift, work.nested_block, kNested);
    const float entry = __ldg((work.nf4 ? kDeviceNf4 : kDeviceFp4).values + code);
    const int64_t row = i / work.columns;
    out[(segment.first_row + row) * work.row_stride + (i - row * work.columns)] = from_float<T>(__fmul_rn(entry, scale));
  }
}

/// Outputs above this are written past the lines that L2 keeps; a following GEMM finds smaller ones there.
constexpr int64_t kStreamBytes = int64_t{48} << 20;

template <class T, int kSubBlock>
cudaError_t launch_tiles(Work& work, bool nested, Stream stream) {
  constexpr int kSteps = 8;
  constexpr int kTile = kSteps * kStep;
  constexpr int kThreads = 128;
  int64_t elements = 0;
  for (int i = 0; i < work.segment_count; ++i) {
    work.segments[i].first_tile = work.tiles;
    work.tiles += (work.segments[i].count + kTile - 1) / kTile;
    elements += work.segments[i].count;
  }
  work.weight_blocks = static_cast<unsigned>((work.tiles + kThreads / 32 - 1) / (kThreads / 32));
  const int64_t pieces = (int64_t{work.borders.out} + work.borders.in) * work.borders.spare / kChunk;
  const auto grid = work.weight_blocks + static_cast<unsigned>((pieces + kThreads - 1) / kThreads);
  const bool rows = work.row_stride != work.columns;
  const auto run = [&](auto nests, auto streams) {
    constexpr bool kNested = decltype(nests)::value;
    constexpr bool kStream = decltype(streams)::value;
    if (rows) return launch_early<expand_tiles<T, kSteps, kSubBlock, kNested, true, kStream>>(grid, kThreads, 0, stream, work);
    return launch_early<expand_tiles<T, kSteps, kSubBlock, kNested, false, kStream>>(grid, kThreads, 0, stream, work);
  };
  const bool large = elements * static_cast<int64_t>(sizeof(T)) > kStreamBytes;
  if (nested) return large ? run(std::true_type{}, std::true_type{}) : run(std::true_type{}, std::false_type{});
  return large ? run(std::false_type{}, std::true_type{}) : run(std::false_type{}, std::false_type{});
}

template <class T>
cudaError_t launch_elements(const Work& work, bool nested, Stream stream) {
  for (int i = 0; i < work.segment_count; ++i) {
    const int64_t blocks = (work.segments[i].count + 255) / 256;
    const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20));
    if (nested) expand_elements<T, true><<<grid, 256, 0, stream>>>(work, i);
    else expand_elements<T, false><<<grid, 256, 0, stream>>>(work, i);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class T>
bool is_vectorizable(const Work& work) {
  constexpr int64_t kVector = 16 / static_cast<int64_t>(sizeof(T));  // elements of an access
  const bool rows = work.row_stride != work.columns;
  if (!aligned_to(work.out, 16)) return false;
  if (rows && (work.columns % kChunk != 0 || work.row_stride % kVector != 0 || work.columns >= int64_t{1} << 30)) return false;
  for (int i = 0; i < work.segment_count; ++i)
    if (!aligned_to(work.segments[i].packed, 4) || work.segments[i].first_row * work.row_stride % kVector != 0) return false;
  return true;
}

/// Whether threads of the same launch can write the borders, eight elements at a time.
bool fits_beside(const Augmentation& borders) {
  return borders.spare % kChunk == 0 && borders.in % kChunk == 0 &&
         (int64_t{borders.out} + borders.in) * borders.spare < int64_t{1} << 31;
}

template <class T>
cudaError_t launch(Work& work, bool nested, const DequantizeFourBit& asked, Stream stream) {
  const bool tiles = is_vectorizable<T>(work), borders = asked.borders.count > 0;
  const bool together = tiles && borders && work.row_stride != work.columns && fits_beside(asked.borders);
  if (together) work.borders = asked.borders;
  cudaError_t error = cudaSuccess;
  if (!tiles) error = launch_elements<T>(work, nested, stream);
  else if (work.block_shift == 5) error = launch_tiles<T, 32>(work, nested, stream);
  else error = launch_tiles<T, 64>(work, nested, stream);
  if (error != cudaSuccess || !borders || together) return error;
  return lora_augment(asked.out, asked.type, asked.borders, stream);
}

/// @returns whether the scales are nested. Empty segments are left out.
bool prepare(const DequantizeFourBit& asked, Work& work) {
  bool nested = false;
  for (int i = 0; i < asked.segment_count; ++i) {
    const FourBitSegment& from = asked.segments[i];
    if (from.rows * asked.columns == 0) continue;
    work.segments[work.segment_count++] = {
        from.packed, from.absmax, from.nested_absmax, from.nested_offset, from.rows * asked.columns, 0, from.first_row};
    nested = from.nested_absmax != nullptr;
  }
  work.columns = asked.columns;
  work.row_stride = asked.row_stride;
  work.out = asked.out;
  work.nested_block = make_divisor(asked.nested_block_size);
  work.block_shift = make_divisor(asked.block_size).shift;
  work.nf4 = asked.quant_type == QuantType::kNf4;
  return nested;
}

}  // namespace

cudaError_t dequantize_4bit(const DequantizeFourBit& asked, Stream stream) {
  if (!has_code_book(asked.quant_type)) {
    const cudaError_t error = dequantize_blocks(asked, stream);
    return error != cudaSuccess || asked.borders.count == 0 ? error : lora_augment(asked.out, asked.type, asked.borders, stream);
  }
  Work work{};
  const bool nested = prepare(asked, work);
  if (work.segment_count == 0)
    return asked.borders.count > 0 ? lora_augment(asked.out, asked.type, asked.borders, stream) : cudaSuccess;
  switch (asked.type) {
    case Float::kFloat32:
      return launch<float>(work, nested, asked, stream);
    case Float::kFloat16:
      return launch<__half>(work, nested, asked, stream);
    case Float::kBFloat16:
      return launch<__nv_bfloat16>(work, nested, asked, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace qlorapp::cuda
