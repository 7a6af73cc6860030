// SPDX-License-Identifier: Apache-2.0
/// For decode_pass.cu: what a CTA shares, how CTAs wait for each other, and the order in which warps ask for weights.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode_pass.hpp"
#include "few_rows.cuh"
#include "head_sums.cuh"
#include "pass_formulas.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kPassWarps = 16, kPassThreads = 32 * kPassWarps;
constexpr int kNear = 6;          ///< Phases whose description is in shared memory: the present one and those after it.
constexpr int kFewestKeys = 256;  ///< Of a CTA, where a row has more than one.
constexpr int kLines = 8, kLineCounters = 32;  ///< CTAs count themselves in one of several lines of memory.
/// Of DecodePass::counters: the lines, parts of u that were formed, CTAs that are done, and of each pair of row and heads the CTAs that have come.
constexpr int kFormed = kLines * kLineCounters, kDone = kFormed + kLineCounters, kCome = kDone + kLineCounters;
constexpr int kMostGroups = 16;  ///< Of a CTA at a time: so a warp has parts of at most two.

/// Of a launch for so many rows: stages of a ring of a warp; strips that share x, at most; floats of what warps tell each other, sums of two groups of
/// strips.
template <int kRows>
struct Plan {
  static constexpr int kRing = kRows <= 4 ? 4 : 3, kShare = kRows <= 4 ? 1 : 2;
  static constexpr int kParts = std::max(3072, kPassWarps * 2 * kShare * kRows * kStrip);
  static constexpr int kInner = kRows <= 4 ? 8 : 4096;  ///< Elements of u that shared memory has room for.
};

/// Where a warp's asking has come to. The stages of a group that are left, and where they lie, are in registers.
struct Place {
  int index, share;                     ///< Of the phase.
  int groups_end, turn, count, stages;  ///< Of the turn: its first group, its groups, the stages of each.
  int group, at, end;                   ///< The group, and the warp's stages of the turn.
};

template <int kRows>
struct Shared {
  static constexpr int kRingBytes = Plan<kRows>::kRing * kStageBytes, kWarpsInFront = kInFront / kRingBytes;

  unsigned char rings_in_front[kInFront];
  unsigned char table[kWideTable];
  unsigned char rings_behind[kPassWarps - kWarpsInFront][kRingBytes];
  PassPhase near[kNear];
  float parts[Plan<kRows>::kParts];
  float map[256];
  float most[kPassWarps][kHeads], sum[kPassWarps][kHeads];
  float totals[kHeads], largest[kHeads];
  float squares[kFewTokens][kPassWarps];                ///< Of x, by the warps that added them up.
  int first_warp[kMostGroups], last_warp[kMostGroups];  ///< Of a turn: who has a group.
  int first_group[kPassWarps];                          ///< A warp's first group.
  Place places[kPassWarps];
  T u[Plan<kRows>::kInner];
  int is_last;

  __device__ __forceinline__ unsigned char* ring_of(int warp) {
    return warp < kWarpsInFront ? rings_in_front + warp * kRingBytes : rings_behind[warp - kWarpsInFront];
  }
};

static_assert(sizeof(Shared<4>) <= kMostShared && sizeof(Shared<8>) <= kMostShared);

/// Nobody waits longer: a CTA that never comes is an error of this file, which must not hold the device for ever.
__device__ __forceinline__ void wait_until(const unsigned* counter, unsigned wanted) {
  unsigned found = 0;
  for (int64_t turn = 0;; ++turn) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    if (found >= wanted) return;
    if (turn == (int64_t{1} << 26)) __trap();
  }
}
__device__ __forceinline__ void count_one(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

/// A CTA's part of a product: a range of its groups of `share` strips. Of up to 16 groups at a time, group by group, the stages are divided among
/// the warps.
struct Turn {
  int group, groups_end;  ///< The first group of the turn; where the CTA's range ends.
  int stages, count;      ///< Of a group; groups of the turn.

  __device__ explicit Turn(const PassPhase& phase)
      : group(static_cast<int>(static_cast<unsigned>(phase.groups) * blockIdx.x / gridDim.x)),
        groups_end(static_cast<int>(static_cast<unsigned>(phase.groups) * (blockIdx.x + 1) / gridDim.x)),
        stages(phase.k / kStage),
        count(min(kMostGroups, groups_end - group)) {}
  __device__ void next() {
    group += count;
    count = min(kMostGroups, groups_end - group);
  }
  /// The first stage of a warp; that of the warp after it is where its own end.
  __device__ int first(int warp) const { return count * stages * warp / kPassWarps; }
  __device__ int warp_of(int stage) const { return ((stage + 1) * kPassWarps - 1) / (count * stages); }
};

/// The weight that a strip belongs to, where strips are not gated.
__device__ __forceinline__ int weight_of(const PassPhase& phase, int strip) {
  int i = 0;
#pragma unroll
  for (int next = 1; next < PassPhase::kMostWeights; ++next) i += next < phase.count && strip >= phase.first_strip[next] ? 1 : 0;
  return i;
}

/// What a lane copies of the stage that its warp asks for next.
struct Source {
  /// 16 bytes of one of the first four rows of the strip's halves.
  const unsigned char* codes[2] = {};
  /// Of the weight: codes of scales, or scales; of the upper lanes those of the second level.
  const unsigned char* scales = nullptr;
  uint32_t scale = 0;                 ///< The first block of the lane's row in the stage.
  uint32_t four_rows = 0, strip = 0;  ///< Bytes from one row to the fourth after it, and to the next strip.
  int left = 0;                       ///< Stages of the group, this one included; 0: there is none.
};

__device__ __forceinline__ Source source_of(const PassPhase& phase, int group, int stage, int lane) {
  const int strip = group * phase.share, i = phase.gated ? 0 : weight_of(phase, strip), scale_row = lane % 16;
  const int height = phase.gated ? kStrip / 2 : kStrip;  // of a strip, in rows of each of its weights
  const PassWeight &first = phase.weights[i], &second = phase.weights[phase.gated ? 1 : i];
  const auto row_bytes = static_cast<uint32_t>(phase.k / 2), blocks = static_cast<uint32_t>(phase.k / kBlock);
  const auto row0 = static_cast<uint32_t>((strip - (phase.gated ? 0 : phase.first_strip[i])) * height);
  const uint32_t offset = (row0 + static_cast<uint32_t>(lane) / 8) * row_bytes + static_cast<uint32_t>(lane) % 8 * 16 +
                          static_cast<uint32_t>(stage) * (kStage / 2);
  const PassWeight& of_scales = scale_row < 8 ? first : second;
  return {.codes = {first.packed + offset, second.packed + offset + (phase.gated ? 0 : 8 * row_bytes)},
          .scales = static_cast<const unsigned char*>(lane < 16 ? of_scales.absmax : of_scales.nested_absmax),
          .scale = (row0 + static_cast<uint32_t>(scale_row % height)) * blocks + static_cast<uint32_t>(stage) * 4,
          .four_rows = 4 * row_bytes,
          .strip = static_cast<uint32_t>(height) * row_bytes,
          .left = 0};
}

/// The end of a group was reached, or that of the warp's part: what follows. Not inlined, like what else is run a few times a phase: code is read
/// from memory, too, and what has been run once is gone before it is run again.
/// @param current  the phase that is computed.
__device__ __noinline__ Source next_source(const DecodePass& pass, const PassPhase* near, Place* place, int warp, int lane,
                                           int current) {
  const auto phase = [&](int index) -> const PassPhase& {
    return index < current + kNear - 1 ? near[index % kNear] : pass.phases[index];
  };
  Place here = *place;
  int stage = 0;
  if (here.at < here.end) {
    ++here.group;
  } else {
    for (;;) {
      here.turn += here.count;
      here.count = min(kMostGroups, here.groups_end - here.turn);
      while (here.count <= 0) {
        here.index = here.index >= 0                      ? phase(here.index).next_product
                     : near[0].kind == PassKind::kProduct ? 0
                                                          : near[0].next_product;
        if (here.index >= pass.count) return {};
        const Turn turn(phase(here.index));
        here.share = phase(here.index).share, here.turn = turn.group, here.groups_end = turn.groups_end;
        here.count = turn.count, here.stages = turn.stages;
      }
      here.at = here.count * here.stages * warp / kPassWarps, here.end = here.count * here.stages * (warp + 1) / kPassWarps;
      if (here.at < here.end) break;
    }
    here.group = here.turn + here.at / here.stages, stage = here.at % here.stages;
  }
  Source source = source_of(phase(here.index), here.group, stage, lane);
  source.left = min(here.stages - stage, here.end - here.at);
  here.at += source.left;
  __syncwarp();
  if (lane == 0) *place = here;
  __syncwarp();
  return source;
}

/// The stages that a warp asks for, in the order in which it will multiply them.
template <int kShare>
class Ahead {
 public:
  __device__ __forceinline__ Ahead(const DecodePass& pass, const PassPhase* near, Place* place, int warp, int lane)
      : pass_(pass), near_(near), place_(place), warp_(warp), lane_(lane) {
    if (lane == 0)
      *place = {.index = -1, .share = 1, .groups_end = 0, .turn = 0, .count = 0, .stages = 0, .group = 0, .at = 0, .end = 0};
    __syncwarp();
    source_ = next_source(pass, near, place, warp, lane, 0);
  }

  /// @param current  the phase that is computed.
  __device__ __forceinline__ void ask(unsigned char* to, int current) {
    if (source_.left > 0) {
      copy(to);
      if (kShare == 2 && !is_second_ && place_->share == 2) {
        is_second_ = true;
      } else {
        is_second_ = false;
        source_.codes[0] += kStage / 2, source_.codes[1] += kStage / 2, source_.scale += kStage / kBlock;
        if (--source_.left == 0) source_ = next_source(pass_, near_, place_, warp_, lane_, current);
      }
    }
    end_group();
  }

 private:
  __device__ __forceinline__ void copy(unsigned char* to) const {
    const uint32_t strip = kShare == 2 && is_second_ ? source_.strip : 0;
    unsigned char* const place = to + place_of_codes(lane_);
#pragma unroll
    for (int q = 0; q < 4; ++q)
      copy_async<16>(place + q * 4 * (kStage / 2), source_.codes[q / 2] + (strip + (q % 2 == 0 ? 0U : source_.four_rows)));
    const uint32_t scale = source_.scale + strip / (kBlock / 2);
    unsigned char* const scales = to + kStageCodes;
    if (pass_.nested) {
      const uint32_t nested =
          pass_.nested_shift >= 0 ? scale >> pass_.nested_shift : scale / static_cast<uint32_t>(pass_.nested_block_size);
      copy_async<4>(scales + lane_ * 4, source_.scales + (lane_ < 16 ? scale : nested * 4));
    } else if (lane_ < 16) {
      copy_async<16>(scales + lane_ * 16, source_.scales + static_cast<int64_t>(scale) * 4);
    }
  }

  const DecodePass& pass_;
  const PassPhase* near_;
  Place* place_;
  const int warp_, lane_;
  Source source_;
  bool is_second_ = false;  ///< Strip of a group.
};

/// A CTA's view of the pass.
template <int kRows>
struct Here {
  const DecodePass& pass;
  Shared<kRows>& shared;
  int thread, warp, lane;
};

}  // namespace
}  // namespace qlorapp::cuda
