// SPDX-License-Identifier: Apache-2.0
/// For decode_pass.cu: products with what follows them, and sums of the residual stream.
#pragma once

#include <cstdint>

#include "pack.cuh"
#include "pass_attention.cuh"
#include "pass_work.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

/// Adds up the squares of x, a part a warp. Read behind the next barrier.
template <int kRows>
__device__ __forceinline__ void add_squares(const Here<kRows>& here, const PassPhase& phase) {
  if (phase.squares == nullptr) return;
#pragma unroll 1
  for (int token = 0; token < here.pass.m; ++token) {
    float sum = 0.0F;
#pragma unroll 1
    for (int strip = here.thread; strip < phase.k / kStrip; strip += kPassThreads)
      sum += __ldcg(phase.squares + strip * PassPhase::kSquaresEach + token);
    sum = across_warp<Sum>(sum);
    if (here.lane == 0) here.shared.squares[token][here.warp] = sum;
  }
}
template <int kRows>
__device__ __forceinline__ float rstd_of(const Here<kRows>& here, const PassPhase& phase, int token) {
  if (phase.squares == nullptr) return 1.0F;
  float sum = 0.0F;
#pragma unroll
  for (int w = 0; w < kPassWarps; ++w) sum += here.shared.squares[token][w];
  return rsqrtf(sum / static_cast<float>(phase.k) + phase.eps);
}

/// Operands of an element beside its product: the stream's value and the next norm's weight. Read early, so that their latency is hidden.
struct Beside {
  float stream = 0.0F, weight = 1.0F;
};
template <int kRows>
__device__ __forceinline__ Beside beside(const Here<kRows>& here, const PassPhase& phase, int token, int column) {
  Beside found;
  if (phase.stream != nullptr) found.stream = to_float(static_cast<const T*>(phase.stream)[token * phase.width + column]);
  if (phase.next_norm != nullptr) {
    const float weight = to_float(__ldg(static_cast<const T*>(phase.next_norm) + column));
    found.weight = here.pass.norm_rule == NormRule::kOnePlus ? weight + 1.0F : weight;
  }
  return found;
}
/// Adds to the stream. @returns its value.
__device__ __forceinline__ float add_to_stream(const PassPhase& phase, float result, float stream, int token, int column) {
  if (phase.factor != 1.0F) result = rounded<T>(result * phase.factor);
  const T sum = from_float<T>(stream + result);
  static_cast<T*>(phase.stream)[token * phase.width + column] = sum;
  return to_float(sum);
}
/// Writes the next norm's input and sums of squares. All lanes call it; 16 neighbors have 16 columns of one row.
__device__ __forceinline__ void leave_for_norm(const PassPhase& phase, float value, float weight, int token, int column, int lane,
                                               bool is_there) {
  if (is_there && phase.next_x != nullptr)
    static_cast<T*>(phase.next_x)[token * phase.width + column] = from_float<T>(value * weight);
  if (phase.next_squares == nullptr) return;
  float square = is_there ? value * value : 0.0F;
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
  if (is_there && lane % 16 == 0) phase.next_squares[column / kStrip * PassPhase::kSquaresEach + token] = square;
}

/// This CTA's part of u = x·Aᵀ: a column of it at a time, of some rows.
template <int kRows>
__device__ __forceinline__ void form_u(const Here<kRows>& here, const PassPhase& phase) {
  const int m = here.pass.m, ctas = static_cast<int>(gridDim.x), each = phase.rows_of_a_job;
  float* const parts = here.shared.parts;
  for (int job = static_cast<int>(blockIdx.x); job < phase.jobs; job += ctas) {
    const int rank = job % phase.ranks, first = job / phase.ranks * each, rows = min(each, m - first);
    const T* const a = static_cast<const T*>(phase.a) + static_cast<int64_t>(rank) * phase.k;
    const T* const own_x = static_cast<const T*>(phase.x) + first * phase.k;
    float sums[kRows] = {};
#pragma unroll 2
    for (int at = here.thread * 8; at < phase.k; at += kPassThreads * 8) {
      float own[8];
      load_eight(a + at, own);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i >= rows) break;
        float x[8];
        unpack<T>(*reinterpret_cast<const uint4*>(own_x + i * phase.k + at), x);
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[i] += own[e] * x[e];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i >= rows) break;
      sums[i] = across_warp<Sum>(sums[i]);
      if (here.lane == 0) parts[here.warp * kFewTokens + i] = sums[i];
    }
    __syncthreads();
    if (here.thread < rows) {
      const int row = first + here.thread;
      float sum = 0.0F;
#pragma unroll
      for (int w = 0; w < kPassWarps; ++w) sum += parts[w * kFewTokens + here.thread];
      static_cast<T*>(here.pass.u)[row * phase.ranks + rank] = from_float<T>(sum * rstd_of(here, phase, row));
    }
    __syncthreads();
    if (here.thread == 0) count_one(here.pass.counters + kFormed);
  }
}

/// sum + scaling·u·bᵀ of 8 elements at a time, two of them on their way at once.
__device__ __forceinline__ float low_rank(const T* u, const T* b, int rank) {
  float sum = 0.0F;
#pragma unroll 1
  for (int r = 0; r < rank; r += 16) {
    const bool has_second = r + 8 < rank;
    const uint4 nothing = make_uint4(0, 0, 0, 0);
    const uint4 b_words[2] = {__ldg(reinterpret_cast<const uint4*>(b + r)),
                              has_second ? __ldg(reinterpret_cast<const uint4*>(b + r + 8)) : nothing};
    const uint4 u_words[2] = {*reinterpret_cast<const uint4*>(u + r),
                              has_second ? *reinterpret_cast<const uint4*>(u + r + 8) : nothing};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float own[8], of_b[8];
      unpack<T>(u_words[half], own);
      unpack<T>(b_words[half], of_b);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += own[i] * of_b[i];
    }
  }
  return sum;
}
/// bias + scaling·u·Bᵀ + sum of one element of a layer. @param u  of the row of x.
__device__ __forceinline__ float with_adapter(const PassPhase& phase, int weight_index, const T* u, int row, float sum) {
  const PassWeight& weight = phase.weights[weight_index];
  if (weight.b != nullptr) {
    const T* const b = static_cast<const T*>(weight.b) + static_cast<int64_t>(row) * weight.rank;
    const T* const own = u + weight.u_column;
    float added = 0.0F;
    if (phase.wide_ranks) {
      added = low_rank(own, b, weight.rank);
    } else {
#pragma unroll 1
      for (int r = 0; r < weight.rank; ++r) added += to_float(own[r]) * to_float(__ldg(b + r));
    }
    sum += weight.scaling * added;
  }
  return phase.bias == nullptr ? sum
                               : sum + to_float(__ldg(static_cast<const T*>(phase.bias) + phase.first_row[weight_index] + row));
}

/// Adds up what the warps have of a turn, and writes what it gives.
template <int kRows>
__device__ __forceinline__ void finish_turn(const Here<kRows>& here, const PassPhase& phase, const Turn& turn, const T* u) {
  const int m = here.pass.m, share = phase.share;
  const auto total = [&](int group, int of_share, int token, int row) {
    const int last = here.shared.last_warp[group];
    float sum = 0.0F;
    for (int w = here.shared.first_warp[group]; w <= last; ++w) {
      const int which = here.shared.first_group[w] == group ? 0 : 1;
      sum += here.shared.parts[(((w * 2 + which) * share + of_share) * m + token) * kStrip + row];
    }
    return sum;
  };
  const int outs = turn.count * share * m * kStrip;
  for (int first = 0; first < outs; first += kPassThreads) {  // whole warps: lanes exchange what they have
    const int out = first + here.thread;
    if (out - here.lane >= outs) break;
    const bool is_there = out < outs;
    const int row = out % kStrip, token = is_there ? out / kStrip % m : 0, own = is_there ? out / kStrip / m : 0;
    const int strip = turn.group * share + own, weight = phase.gated ? row / (kStrip / 2) : weight_of(phase, strip);
    const int own_row =
        phase.gated ? strip * (kStrip / 2) + row % (kStrip / 2) : (strip - phase.first_strip[weight]) * kStrip + row;
    const int column = phase.first_row[phase.gated ? 0 : weight] + own_row;
    const Beside other = is_there ? beside(here, phase, token, column) : Beside{};
    float value = 0.0F;
    if (is_there)
      value = rounded<T>(with_adapter(phase, weight, u + token * phase.ranks, own_row,
                                      rstd_of(here, phase, token) * total(own / share, own % share, token, row)));
    T* const y = static_cast<T*>(phase.y) + token * phase.width + column;
    if (phase.gated) {
      const float up = __shfl_down_sync(kAllLanes, value, kStrip / 2);
      if (is_there && row < kStrip / 2) *y = from_float<T>(activated(phase.activation, value, up));
      continue;
    }
    if (is_there && phase.stream != nullptr) value = add_to_stream(phase, value, other.stream, token, column);
    else if (is_there) *y = from_float<T>(value);
    leave_for_norm(phase, value, other.weight, token, column, here.lane, is_there);
  }
}

/// Asks for what later phases will read: this CTA's rows of the next A, and its keys and values.
template <int kRows>
__device__ __forceinline__ void prefetch_later(const Here<kRows>& here, const PassPhase& phase, int index) {
  if (index + 1 >= here.pass.count) return;
  constexpr int kKept = 256 * 1024;  // bytes of a CTA; what all ask for must stay in the L2 cache until it is read
  const PassPhase& next = here.shared.near[(index + 1) % kNear];
  if (next.kind == PassKind::kAttention) {
    const Unit unit(here.pass, next, static_cast<int>(blockIdx.x));
    if (!unit.is_there) return;
    const KeySlots slots(unit.row, here.pass.starts, here.pass.shared_starts, here.pass.shared_lengths);
    const int bytes = here.pass.head_dim * 2, lines = (bytes + kLine - 1) / kLine, most = kKept / (2 * bytes);
    for (int i = here.thread; i < min(unit.end - unit.begin, most) * lines; i += kPassThreads) {
      const int64_t at = (slots.slot(unit.begin + i / lines) * here.pass.kv_heads + unit.kv_head) * bytes + i % lines * kLine;
      prefetch(static_cast<const char*>(next.keys) + at);
      prefetch(static_cast<const char*>(next.values) + at);
    }
  }
  if (phase.next_product >= index + kNear - 1) return;
  const PassPhase& product = here.shared.near[phase.next_product % kNear];
  if (static_cast<int>(blockIdx.x) < product.jobs)
    for (int i = here.thread; i < product.k * 2 / kLine; i += kPassThreads)
      prefetch(static_cast<const char*>(product.a) + static_cast<int64_t>(blockIdx.x) % product.ranks * product.k * 2 + i * kLine);
}

/// Asks for what finish_turn() will read of the adapter.
template <int kRows>
__device__ __forceinline__ void prefetch_adapter(const Here<kRows>& here, const PassPhase& phase, const Turn& turn) {
  if (phase.ranks == 0) return;
  const int height = phase.gated ? kStrip / 2 : kStrip, i = here.thread / kStrip / phase.share;
  if (i >= turn.count) return;
  const int strip = turn.group * phase.share + here.thread / kStrip, row = here.thread % kStrip;
  const int own = phase.gated ? row / height : weight_of(phase, strip);
  const PassWeight& weight = phase.weights[own];
  const int own_row = (strip - (phase.gated ? 0 : phase.first_strip[own])) * height + row % height;
  if (weight.b == nullptr) return;
  prefetch(static_cast<const T*>(weight.b) + static_cast<int64_t>(own_row) * weight.rank);
}

template <int kRows>
__device__ __forceinline__ void multiply_phase(const Here<kRows>& here, const PassPhase& phase, int index,
                                               Ahead<Plan<kRows>::kShare>& ahead, int& slot) {
  using Of = Plan<kRows>;
  const int m = here.pass.m, share = phase.share, stages = phase.k / kStage;
  const int g = here.lane / 4, t = here.lane % 4;
  add_squares(here, phase);
  bool has_u = phase.ranks == 0;
  if (static_cast<int>(blockIdx.x) < phase.jobs) {
    __syncthreads();
    form_u(here, phase);
  }
  const T* const x = static_cast<const T*>(phase.x) + static_cast<int64_t>(g) * phase.k + t * 16;
  __builtin_assume(__isGlobal(x));
  prefetch_later(here, phase, index);
  for (Turn turn(phase); turn.count > 0; turn.next()) {
    prefetch_adapter(here, phase, turn);
    if (here.thread < kPassWarps) {
      here.shared.first_group[here.thread] = turn.first(here.thread) / stages;
      if (here.thread < turn.count) {
        here.shared.first_warp[here.thread] = turn.warp_of(here.thread * stages);
        here.shared.last_warp[here.thread] = turn.warp_of((here.thread + 1) * stages - 1);
      }
    }
    const int begin = turn.first(here.warp), end = turn.first(here.warp + 1);
    int group = turn.group + begin / stages, left = end - begin, stage = begin % stages;
    float* to = here.shared.parts + here.warp * 2 * share * m * kStrip;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {  // of one group, and of the next
      float sums[Of::kShare][4] = {};
      const int count = min(left, stages - stage);
      float offsets[2] = {0.0F, 0.0F};
      if (here.pass.nested && count > 0) {
        const int i = phase.gated ? 0 : weight_of(phase, group * share);
        offsets[0] = __ldg(phase.weights[i].nested_offset);
        offsets[1] = phase.gated ? __ldg(phase.weights[1].nested_offset) : offsets[0];
      }
      const T* own = x + stage * kStage;
#pragma unroll 1
      for (int i = 0; i < count; ++i, own += kStage) {
        const auto x_of = [&](int block) {
          const auto* const from = reinterpret_cast<const uint4*>(own + block * kBlock);
          return g < m ? BlockInput{from[0], from[1]} : BlockInput{};
        };
        BlockInput input[Of::kShare == 1 ? 1 : 4];  // what two strips read is kept
#pragma unroll
        for (int block = 0; block < (Of::kShare == 1 ? 1 : 4); ++block) input[block] = x_of(block);
#pragma unroll
        for (int s = 0; s < Of::kShare; ++s) {
          if (s == share) break;
          wait_groups<Of::kRing - 1>();
          __syncwarp();
          unsigned char* const place = here.shared.ring_of(here.warp) + slot * kStageBytes;
          const auto later = [&](int block) {
            if constexpr (Of::kShare == 1) return x_of(block);
            else return input[block];
          };
          multiply_stage<T>(sums[s], place, input[0], later, here.shared.map, here.lane, here.pass.nested, offsets);
          __syncwarp();
          ahead.ask(place, index);
          slot = slot + 1 == Of::kRing ? 0 : slot + 1;
        }
      }
#pragma unroll
      for (int s = 0; s < Of::kShare; ++s) {
        if (s == share) break;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (t * 2 + i % 2 < m) to[(s * m + t * 2 + i % 2) * kStrip + i / 2 * 8 + g] = sums[s][i];
      }
      to += share * m * kStrip;
      left -= count, stage = 0;
      ++group;
    }
    if (!has_u && here.thread == 0) wait_until(here.pass.counters + kFormed, static_cast<unsigned>(phase.formed));
    __syncthreads();
    const T* u = static_cast<const T*>(here.pass.u);
    if (kRows > 4 && phase.ranks > 0 && m * phase.ranks <= Of::kInner) {
      if (!has_u) {
        for (int i = here.thread; i < m * phase.ranks; i += kPassThreads) here.shared.u[i] = u[i];
        __syncthreads();
      }
      u = here.shared.u;
    }
    has_u = true;
    finish_turn(here, phase, turn, u);
    if (turn.group + turn.count < turn.groups_end) __syncthreads();  // else the phase ends with one
  }
}

/// stream += factor · norm(x), and what the next norm needs of it.
template <int kRows>
__device__ __forceinline__ void sum_phase(const Here<kRows>& here, const PassPhase& phase) {
  const int m = here.pass.m, outs = phase.width * m;  // of 16 columns all rows, then of the next 16
  add_squares(here, phase);
  __syncthreads();
  for (int first = static_cast<int>(blockIdx.x) * kPassThreads; first < outs; first += static_cast<int>(gridDim.x) * kPassThreads) {
    const int out = first + here.thread;
    if (out - here.lane >= outs) break;
    const bool is_there = out < outs;
    const int token = out / kStrip % m, column = out / kStrip / m * kStrip + out % kStrip;
    const Beside other = is_there ? beside(here, phase, token, column) : Beside{};
    float value = other.stream;
    if (is_there && phase.x != nullptr) {
      const float x = to_float(static_cast<const T*>(phase.x)[static_cast<int64_t>(token) * phase.width + column]);
      const float weight = to_float(static_cast<const T*>(phase.norm)[column]), normed = x * rstd_of(here, phase, token);
      value = normed_by(here.pass.norm_rule, normed, weight);
      value = add_to_stream(phase, value, other.stream, token, column);
    }
    leave_for_norm(phase, value, other.weight, token, column, here.lane, is_there);
  }
}

}  // namespace
}  // namespace qlorapp::cuda
