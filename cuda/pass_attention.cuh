// SPDX-License-Identifier: Apache-2.0
/// For decode_pass.cu: attention of a row's new token, whose key and value go to the cache on the way.
#pragma once

#include <cfloat>
#include <cstdint>

#include "pack.cuh"
#include "pass_work.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

/// A CTA's part of attention: a row, up to eight query heads that share a key head, and a part of the row's keys.
struct Unit {
  int pair, split, count;  ///< Of row and heads; of the parts of its keys.
  int row, kv_head, first_head, heads;
  int from, begin, end;  ///< The first key that the query sees; the part.
  bool is_there;

  __device__ Unit(const DecodePass& pass, const PassPhase& phase, int index) {
    const int group = pass.heads / pass.kv_heads, tiles = (group + kHeads - 1) / kHeads, pairs = pass.m * pass.kv_heads * tiles;
    pair = index % pairs, split = index / pairs;
    row = pair / (pass.kv_heads * tiles), kv_head = pair / tiles % pass.kv_heads;
    first_head = kv_head * group + pair % tiles * kHeads, heads = min(kHeads, (kv_head + 1) * group - first_head);
    const auto length = static_cast<int>(__ldg(pass.lengths + row));
    from = phase.window > 0 && length > phase.window ? length - static_cast<int>(phase.window) : 0;
    const int first_tile = from / kKeys * kKeys, keys = length - first_tile,
              used = max(1, min(phase.splits, (keys + kFewestKeys - 1) / kFewestKeys));
    const int chunk = ((keys + used - 1) / used + kKeys - 1) / kKeys * kKeys;
    count = (keys + chunk - 1) / chunk;
    begin = first_tile + split * chunk, end = min(begin + chunk, length);
    is_there = split < count;
  }
};

/// Not inlined: see next_source().
template <int kDim>
__device__ __noinline__ void prepare_head(const DecodePass& pass, const PassPhase& phase, int lane, const T* from, const void* norm,
                                          int64_t position, float* scratch, T* to) {
  prepare_head_of<kDim>(
      HeadRule(pass, phase), lane, [&](int i) { return to_float(from[i]); }, norm, position, scratch, to);
}

template <int kDim, int kRows>
__device__ __forceinline__ void attend_unit(const Here<kRows>& here, const PassPhase& phase, const Unit& unit) {
  constexpr int kBuffers = Plan<kRows>::kParts / (kHeads * kDim), kWidth = kDim + 4;
  Shared<kRows>& shared = here.shared;
  const DecodePass& pass = here.pass;
  const int64_t position = __ldg(pass.positions + unit.row), new_slot = __ldg(pass.slots + unit.row);
  const int dim = pass.head_dim, kv_head = unit.kv_head, first_head = unit.first_head, heads = unit.heads, split = unit.split;
  const int count = unit.count, row = unit.row;
  const int begin = unit.begin, end = unit.end;

  // The row's new key and value go to the cache, by those who attend to them.
  const int g = here.lane / 4, t = here.lane % 4;
  const int width = (pass.heads + 2 * pass.kv_heads) * dim;
  const T* const qkv = static_cast<const T*>(phase.x) + static_cast<int64_t>(row) * width;
  const int64_t slot_stride = static_cast<int64_t>(pass.kv_heads) * dim;
  float* const scratch = shared.parts + here.warp * kDim;  // the first eight become q, in rows of kDim floats
  if (here.warp < heads) {
    prepare_head<kDim>(pass, phase, here.lane, qkv + (first_head + here.warp) * dim, phase.q_norm, position, scratch,
                       reinterpret_cast<T*>(scratch));
  } else if (here.warp >= kHeads && here.warp < kHeads + 2 && split == count - 1) {
    const int64_t place = new_slot * slot_stride + static_cast<int64_t>(kv_head) * dim;
    if (here.warp == kHeads) {
      prepare_head<kDim>(pass, phase, here.lane, qkv + (pass.heads + kv_head) * dim, phase.k_norm, position, scratch,
                         static_cast<T*>(phase.keys) + place);
    } else {
      const T* const v = qkv + (pass.heads + pass.kv_heads + kv_head) * dim;
      for (int i = here.lane; i < dim; i += 32) static_cast<T*>(phase.values)[place + i] = v[i];
    }
    __threadfence_block();
  }
  __syncthreads();

  const KeySlots slots(row, pass.starts, pass.shared_starts, pass.shared_lengths);
  const T* const keys = static_cast<const T*>(phase.keys) + static_cast<int64_t>(kv_head) * dim;
  const T* const values = static_cast<const T*>(phase.values) + static_cast<int64_t>(kv_head) * dim;
  const auto* const own_q = reinterpret_cast<const unsigned char*>(shared.parts + g * kDim);
  const auto q_of = [&](int j) {
    const int at = j * 32 + t * 8;
    return g < heads && at < dim ? *reinterpret_cast<const uint4*>(own_q + at * 2) : make_uint4(0, 0, 0, 0);
  };
  HeadSums<kDim> sums;
  for (int base = begin + here.warp * kKeys; base < end; base += kPassWarps * kKeys)
    attend_keys<T, kDim, true>(sums, q_of, keys, values, slots, slot_stride, unit.from, base, end, dim, phase.scale, g, t);
  sums.sum += __shfl_xor_sync(kAllLanes, sums.sum, 1);
  sums.sum += __shfl_xor_sync(kAllLanes, sums.sum, 2);
  if (t == 0) shared.most[here.warp][g] = sums.most, shared.sum[here.warp][g] = sums.sum;
  __syncthreads();  // q was read, too
  float all = -FLT_MAX, total = 0.0F;
#pragma unroll 4
  for (int w = 0; w < kPassWarps; ++w) all = fmaxf(all, shared.most[w][g]);
#pragma unroll 4
  for (int w = 0; w < kPassWarps; ++w) total += shared.sum[w][g] * exp2f(shared.most[w][g] - all);
  if (here.warp == 0 && t == 0) shared.totals[g] = total, shared.largest[g] = all;
  const float own = exp2f(sums.most - all);
  const int active = min(kPassWarps, static_cast<int>(end - begin + kKeys - 1) / kKeys), turns = (active + kBuffers - 1) / kBuffers;
  for (int turn = 0; turn < turns; ++turn) {
    if (here.warp / kBuffers == turn) {
      float* const to = shared.parts + here.warp % kBuffers * kHeads * kDim + here.lane;  // [c][half][i][lane]
#pragma unroll
      for (int c = 0; c < kDim / 64; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& place = to[((c * 2 + half) * 8 + i) * 32];
            place = turn == 0 ? sums.out[c][i][half] * own : place + sums.out[c][i][half] * own;
          }
    }
    __syncthreads();
  }
  const int buffers = min(kBuffers, active);
  T* const out = static_cast<T*>(phase.y) + (static_cast<int64_t>(row) * pass.heads + first_head) * dim;
  float* const partial =
      pass.partial + static_cast<int64_t>(unit.pair) * phase.splits * kHeads * kWidth;  // [split][head]: elements, maximum, sum
  for (int i = here.warp; i < kDim / 32; i += kPassWarps) {                             // eight elements a lane
    const int head = here.lane / 4, e = i / 2 * 64 + here.lane % 4 * 16 + i % 2 * 8;
    if (head >= heads || e >= dim) continue;
    float values[8] = {};
    for (int b = 0; b < buffers; ++b)
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] += shared.parts[b * kHeads * kDim + (i * 8 + j) * 32 + here.lane];
    if (count == 1) {
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] /= shared.totals[head];
      store_eight<false>(out + head * dim + e, values);
    } else {
      store_eight<false>(partial + (split * kHeads + head) * kWidth + e, values);
    }
  }
  if (count == 1) {
    __syncthreads();
    return;
  }
  if (here.thread < heads) {
    partial[(split * kHeads + here.thread) * kWidth + kDim] = shared.largest[here.thread];
    partial[(split * kHeads + here.thread) * kWidth + kDim + 1] = shared.totals[here.thread];
  }
  __syncthreads();
  unsigned* const arrived = pass.counters + kCome + unit.pair;
  if (here.thread == 0) {
    unsigned before = 0;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    shared.is_last = before == static_cast<unsigned>(count) - 1 ? 1 : 0;
    if (shared.is_last != 0) *arrived = 0;
  }
  __syncthreads();
  if (shared.is_last == 0) return;
  // Factors of the parts, of each head.
  float* const factors = shared.parts;
  if (here.warp < heads) {
    const float* const own_head = partial + here.warp * kWidth + kDim;
    float most = -FLT_MAX, sum = 0.0F;
    for (int s = here.lane; s < count; s += 32) most = fmaxf(most, __ldcg(own_head + s * kHeads * kWidth));
    most = across_warp<Max>(most);
    for (int s = here.lane; s < count; s += 32) {
      const float factor = exp2f(__ldcg(own_head + s * kHeads * kWidth) - most);
      factors[here.warp * count + s] = factor;
      sum += __ldcg(own_head + s * kHeads * kWidth + 1) * factor;
    }
    sum = across_warp<Sum>(sum);
    for (int s = here.lane; s < count; s += 32) factors[here.warp * count + s] /= sum;
  }
  __syncthreads();
  for (int i = here.thread; i < heads * dim; i += kPassThreads) {
    const int head = i / dim, e = i % dim;
    float value = 0.0F;
#pragma unroll 4
    for (int s = 0; s < count; ++s) value += __ldcg(partial + (s * kHeads + head) * kWidth + e) * factors[head * count + s];
    out[i] = from_float<T>(value);
  }
  __syncthreads();
}

template <int kDim, int kRows>
__device__ __forceinline__ void attend_phase(const Here<kRows>& here, const PassPhase& phase) {
  const int group = here.pass.heads / here.pass.kv_heads,
            pairs = here.pass.m * here.pass.kv_heads * ((group + kHeads - 1) / kHeads);
  for (int i = static_cast<int>(blockIdx.x); i < pairs * phase.splits; i += static_cast<int>(gridDim.x)) {
    const Unit unit(here.pass, phase, i);
    if (unit.is_there) attend_unit<kDim>(here, phase, unit);
  }
}

}  // namespace
}  // namespace qlorapp::cuda
