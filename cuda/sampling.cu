// SPDX-License-Identifier: Apache-2.0
#include "sampling.hpp"

#include <cmath>

#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 1024, kWarpSize = 32, kWarps = kThreads / kWarpSize;
constexpr int kAhead = 8;            // scores that a thread asks for before it looks at one
constexpr int kBins = 2 * kThreads;  // of a histogram
constexpr int kBinsOfOne = 64;       // of the first histogram: below the largest score, as far as weights reach (32)
constexpr int kNear = kThreads;      // tokens that are put in order one beside the other

using Key = unsigned long long;  // atomics are declared for this type
using Weight = unsigned long long;

/// Scores by their order, equal ones by their index.
__device__ __forceinline__ Key key_of(float score, int64_t index) {
  const uint32_t bits = __float_as_uint(score + 0.0F);  // -0 is 0
  const uint32_t ordered = (bits >> 31) != 0U ? ~bits : bits | 0x8000'0000U;
  return (Key{ordered} << 32) | static_cast<Key>(index);
}
__device__ __forceinline__ Weight weight_of(float score, float most) { return static_cast<Weight>(expf(score - most) * 0x1p40F); }

template <class F>
__device__ __forceinline__ void each_score(const float* scores, int64_t begin, int64_t end, const F& see) {
  for (int64_t first = begin + threadIdx.x; first < end; first += kThreads * kAhead) {
    float values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i * kThreads < end) values[i] = scores[first + i * kThreads];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i * kThreads < end) see(values[i], first + i * kThreads);
  }
}

/// The row's largest score; NaN where no token has a weight.
__device__ float largest(const float* scores, int64_t count) {
  float most = -INFINITY;
  bool whole = true;
  each_score(scores, 0, count, [&](float score, int64_t) {
    most = fmaxf(most, score);
    whole = whole && !isnan(score);
  });
  most = across_block<Max>(most, -INFINITY);
  return __syncthreads_and(whole) != 0 && isfinite(most) ? most : NAN;
}

/// Of all values of threads before this one.
__device__ Weight sum_before(Weight value) {
  __shared__ Weight of_warps[kWarps];
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto up_to = [&](Weight sum) {
#pragma unroll
    for (unsigned distance = 1; distance < kWarpSize; distance *= 2) {
      const Weight other = __shfl_up_sync(0xffffffffU, sum, distance);
      if (lane >= distance) sum += other;
    }
    return sum;
  };
  const Weight of_warp = up_to(value);
  if (lane == kWarpSize - 1) of_warps[warp] = of_warp;
  __syncthreads();
  const Weight of_all = up_to(of_warps[lane]);
  const Weight before = __shfl_sync(0xffffffffU, of_all, static_cast<int>(warp + kWarpSize - 1) % kWarpSize);
  __syncthreads();  // of_warps may be written again
  return (warp == 0 ? 0 : before) + of_warp - value;
}

struct Shared {
  uint32_t low[kBins], high[kBins];  // a bin's sum: atomics of 64 bits are loops in shared memory
  Key keys[kNear];
  Weight weights[kNear];
  Key first, last, cut;
  Weight above;
  unsigned bin, near;
};

__device__ __forceinline__ void add_to_bin(Shared& shared, unsigned bin, Weight weight) {
  const auto low = static_cast<uint32_t>(weight);
  const uint32_t before = atomicAdd(&shared.low[bin], low);
  const uint32_t carry = before + low < before ? 1 : 0;
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
  if (high != 0) atomicAdd(&shared.high[bin], high);
}

/// Finds the bin, of those in rising order, that brings the sum to `limit`; adds what is before it to shared.above. Empties the bins.
__device__ void find_bin(Shared& shared, Weight limit) {
  __syncthreads();
  const unsigned own = 2 * threadIdx.x;
  Weight sums[2];
#pragma unroll
  for (unsigned i = 0; i < 2; ++i) {
    sums[i] = (Weight{shared.high[own + i]} << 32) + shared.low[own + i];
    shared.high[own + i] = shared.low[own + i] = 0;
  }
  const Weight above = shared.above;
  Weight before = above + sum_before(sums[0] + sums[1]);  // with a barrier: all have read `above`
#pragma unroll
  for (unsigned i = 0; i < 2; ++i) {
    if (before < limit && limit <= before + sums[i]) shared.bin = own + i, shared.above = before;
    before += sums[i];
  }
  __syncthreads();
}

/// The key of the token that brings the sum of falling keys to `limit`, which is at most the sum of all.
/// @param weigh  0: the token is not among them. The bins are empty, before and after.
template <class Weigh>
__device__ Key cut_at(Shared& shared, const float* scores, int64_t count, float most, Weight limit, const Weigh& weigh) {
  if (threadIdx.x == 0) shared.above = 0;
  const auto group_of = [&](float score) {
    return static_cast<unsigned>(fminf((most - score) * kBinsOfOne, static_cast<float>(kBins - 1)));
  };
  each_score(scores, 0, count, [&](float score, int64_t index) {
    if (const Weight weight = weigh(score, index); weight != 0) add_to_bin(shared, group_of(score), weight);
  });
  find_bin(shared, limit);
  const unsigned group = shared.bin;
  Key first = 0, last = ~Key{0};
  while (true) {  // a bin's tokens, until they are few
    if (threadIdx.x == 0) shared.first = ~Key{0}, shared.last = 0, shared.near = 0;
    __syncthreads();
    Key lowest = ~Key{0}, highest = 0;
    each_score(scores, 0, count, [&](float score, int64_t index) {
      const Key key = key_of(score, index);
      if (group_of(score) != group || key < first || key > last) return;
      const Weight weight = weigh(score, index);
      if (weight == 0) return;
      if (const unsigned place = atomicAdd(&shared.near, 1U); place < kNear)
        shared.keys[place] = key, shared.weights[place] = weight;
      lowest = min(lowest, key), highest = max(highest, key);
    });
    if (lowest <= highest) atomicMin(&shared.first, lowest), atomicMax(&shared.last, highest);
    __syncthreads();
    if (shared.near <= kNear) break;
    first = shared.first, last = shared.last;
    int shift = 0;
    while ((last - first) >> shift >= kBins) ++shift;
    each_score(scores, 0, count, [&](float score, int64_t index) {
      const Key key = key_of(score, index);
      if (group_of(score) != group || key < first || key > last) return;
      add_to_bin(shared, static_cast<unsigned>((last - key) >> shift), weigh(score, index));
    });
    find_bin(shared, limit);
    last -= Key{shared.bin} << shift;
    first = max(first, last - ((Key{1} << shift) - 1));
  }
  if (threadIdx.x < shared.near) {
    const Key own = shared.keys[threadIdx.x];
    Weight above = shared.above;
    for (unsigned i = 0; i < shared.near; ++i) above += shared.keys[i] > own ? shared.weights[i] : 0;
    if (above < limit && limit <= above + shared.weights[threadIdx.x]) shared.cut = own;
  }
  __syncthreads();
  return shared.cut;
}

__global__ void __launch_bounds__(kThreads, 1)
    keep_likely(float* all_scores, int64_t count, int64_t top_k, double top_p, float min_p) {
  __shared__ Shared shared;
  float* const scores = all_scores + blockIdx.x * count;
  const float most = largest(scores, count);
  if (isnan(most)) return;
  for (unsigned bin = threadIdx.x; bin < kBins; bin += kThreads) shared.low[bin] = shared.high[bin] = 0;
  __syncthreads();
  Key cut = 0;
  if (top_k > 0 && top_k < count) {
    cut = cut_at(shared, scores, count, most, static_cast<Weight>(top_k), [](float, int64_t) { return Weight{1}; });
    cut = cut >> 32 << 32;  // equal ones stay
  }
  if (top_p < 1.0) {
    Weight sum = 0;
    each_score(scores, 0, count,
               [&](float score, int64_t index) { sum += key_of(score, index) >= cut ? weight_of(score, most) : 0; });
    const Weight total = across_block<Sum>(sum, Weight{0});
    const auto out = static_cast<Weight>((1.0 - top_p) * static_cast<double>(total));
    // All that weigh less have no more than `out` together: those that are left are few, as a rule.
    const Weight least = max(out / static_cast<Weight>(count), Weight{1});
    const Key of_top_k = cut;
    cut = cut_at(shared, scores, count, most, max(total - min(out, total), Weight{1}), [&](float score, int64_t index) {
      const Weight weight = weight_of(score, most);
      return weight >= least && key_of(score, index) >= of_top_k ? weight : 0;
    });
  }
  each_score(scores, 0, count, [&](float score, int64_t index) {
    if (key_of(score, index) < cut || expf(score - most) < min_p) scores[index] = -INFINITY;
  });
}

__global__ void __launch_bounds__(kThreads, 1) draw(const float* all_scores, int64_t count, const double* draws, int64_t* tokens) {
  __shared__ Weight sums[kWarps], wanted;
  __shared__ int part;
  const float* const scores = all_scores + blockIdx.x * count;
  const float most = largest(scores, count);
  if (isnan(most)) {
    if (threadIdx.x == 0) tokens[blockIdx.x] = 0;
    return;
  }
  // A part a warp, then of the part that has it some tokens a thread.
  const int64_t each = (count + kWarps - 1) / kWarps;
  const int64_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Weight sum = 0;
  for (int64_t first = warp * each + lane, end = min(count, (warp + 1) * each); first < end; first += kWarpSize * kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i * kWarpSize < end) sum += weight_of(scores[first + i * kWarpSize], most);
  }
  sum = across_warp<Sum>(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    Weight total = 0;
    for (const Weight one : sums) total += one;
    Weight target = min(total - 1, static_cast<Weight>(draws[blockIdx.x] * static_cast<double>(total)));
    part = 0;
    while (target >= sums[part]) target -= sums[part++];
    wanted = target;
  }
  __syncthreads();
  const int64_t begin = part * each, end = min(count, begin + each), own = (each + kThreads - 1) / kThreads;
  const int64_t from = min(end, begin + static_cast<int64_t>(threadIdx.x) * own), to = min(end, from + own);
  Weight of_own = 0;
  for (int64_t i = from; i < to; ++i) of_own += weight_of(scores[i], most);
  Weight before = sum_before(of_own);
  if (before > wanted || before + of_own <= wanted) return;
  for (int64_t i = from; i < to; ++i) {
    before += weight_of(scores[i], most);
    if (before > wanted) {
      tokens[blockIdx.x] = i;
      return;
    }
  }
}

}  // namespace

cudaError_t keep_likely_tokens(float* scores, int64_t rows, int64_t vocabulary, int64_t top_k, double top_p, double min_p,
                               Stream stream) {
  if (rows == 0 || vocabulary == 0) return cudaSuccess;
  keep_likely<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(scores, vocabulary, top_k, top_p, static_cast<float>(min_p));
  return cudaGetLastError();
}

cudaError_t draw_tokens(const float* scores, int64_t rows, int64_t vocabulary, const double* draws, int64_t* tokens,
                        Stream stream) {
  if (rows == 0 || vocabulary == 0) return cudaSuccess;
  draw<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(scores, vocabulary, draws, tokens);
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
