// SPDX-License-Identifier: Apache-2.0
/// One CTA of 16 warps on each multiprocessor stays for the whole pass. A warp's ring in shared memory is filled in the order in which the warp
/// will multiply, across phases: weights go on arriving while CTAs wait for each other or attend.
///
/// Products: a CTA has a range of strips of 16 rows of W (few_rows.cuh), whose stages are divided among its warps, so that a warp has parts of two
/// strips at most; they are added up in shared memory, in the order of warps. A norm in front of a product is divided up: who writes x multiplies
/// by the norm's weight and leaves sums of squares; who reads it multiplies the sums of its products by rstd. So no CTA waits for a norm. The first
/// CTAs form u = x·Aᵀ before their strips; the others wait for it when their own sums are there.
///
/// Attention: a CTA has one row, up to eight query heads that share a key head, and a part of the row's keys. The last of a row's CTAs to come
/// joins what all found.
///
/// All CTAs are on the device at once (a cooperative launch), so each may wait for the others.
#include <algorithm>
#include <cstdint>

#include "decode_pass.hpp"
#include "pass_attention.cuh"
#include "pass_products.cuh"
#include "pass_work.cuh"

namespace qlorapp::cuda {
namespace {

template <int kDim, int kRows>
__global__ void __launch_bounds__(kPassThreads, 1) run_pass(const __grid_constant__ DecodePass pass) {
#if __CUDA_ARCH__ >= 900  // elsewhere it is never launched, and need not be compiled
  extern __shared__ __align__(128) unsigned char bytes[];
  Shared<kRows>& shared = *reinterpret_cast<Shared<kRows>*>(bytes);
  constexpr int kPieces = static_cast<int>(sizeof(PassPhase)) / 16;
  static_assert(kPieces <= 32);
  require_place(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const Here<kRows> here{pass, shared, thread, warp, lane};
  const auto piece_of = [&](int phase) { return reinterpret_cast<const uint4*>(pass.phases + phase) + lane; };
  const auto place_of = [&](int phase) { return reinterpret_cast<uint4*>(shared.near + phase % kNear) + lane; };
  if (warp < kNear && warp < pass.count && lane < kPieces) *place_of(warp) = __ldg(piece_of(warp));
  __syncthreads();
  Ahead<Plan<kRows>::kShare> ahead(pass, shared.near, shared.places + warp, warp, lane);
  for (int i = 0; i < Plan<kRows>::kRing; ++i) ahead.ask(shared.ring_of(warp) + i * kStageBytes, 0);
  fill_wide<T>(shared.table, pass.quant_type == QuantType::kNf4);
  if (thread < 256) shared.map[thread] = __ldg(kDeviceSignedMap.values + thread);
  __syncthreads();

  int slot = 0;
  for (int index = 0; index < pass.count; ++index) {
    const PassPhase& phase = shared.near[index % kNear];
    uint4 piece;
    const int far = index + kNear - 1;  // its place is that of the phase before this one, which is over
    const bool brings = index > 0 && warp == kPassWarps - 1 && lane < kPieces && far < pass.count;
    if (brings) piece = __ldg(piece_of(far));
    if (phase.kind == PassKind::kProduct) multiply_phase(here, phase, index, ahead, slot);
    else if (phase.kind == PassKind::kAttention) attend_phase<kDim>(here, phase);
    else sum_phase(here, phase);
    if (brings) *place_of(far) = piece;
    if (index + 1 == pass.count) break;
    __syncthreads();
    if (warp == 0) {
      if (lane == 0) count_one(pass.counters + blockIdx.x % kLines * kLineCounters);
      if (lane < kLines)
        wait_until(pass.counters + lane * kLineCounters,
                   static_cast<unsigned>(index + 1) * ((gridDim.x + kLines - 1U - static_cast<unsigned>(lane)) / kLines));
    }
    __syncthreads();
  }
  wait_groups<0>();
  if (thread == 0) {
    unsigned before = 0;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(pass.counters + kDone) : "memory");
    if (before == gridDim.x - 1) {
      for (int i = 0; i < kLines; ++i) pass.counters[i * kLineCounters] = 0;
      pass.counters[kFormed] = pass.counters[kDone] = 0;
    }
  }
#endif
}

struct Kernel {
  const void* function;
  size_t shared;
};
template <int kRows>
Kernel kernel_of_rows(int64_t head_dim) {
  const void* const function = head_dim <= 64    ? reinterpret_cast<const void*>(run_pass<64, kRows>)
                               : head_dim <= 128 ? reinterpret_cast<const void*>(run_pass<128, kRows>)
                                                 : reinterpret_cast<const void*>(run_pass<256, kRows>);
  return {function, sizeof(Shared<kRows>)};
}
Kernel kernel_of(int64_t m, int64_t head_dim) { return m <= 4 ? kernel_of_rows<4>(head_dim) : kernel_of_rows<8>(head_dim); }

}  // namespace

bool has_decode_pass(Float type, int64_t m, int64_t head_dim, int architecture, int multiprocessors) {
  if (type != Float::kBFloat16 || m < 1 || m > kFewTokens || head_dim < 8 || head_dim > 256 || head_dim % 8 != 0 ||
      architecture < 90)
    return false;
  const Kernel kernel = kernel_of(m, head_dim);
  int ctas = 0, multiprocessors_there = 0, device = 0, kept = 0;
  const bool fits =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&kept, cudaDevAttrReservedSharedMemoryPerBlock, device) == cudaSuccess && kept == kSystem &&
      cudaDeviceGetAttribute(&multiprocessors_there, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kernel.shared)) ==
          cudaSuccess &&
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel.function, kPassThreads, kernel.shared) == cudaSuccess;
  if (!fits) cudaGetLastError();  // a question that failed is no error of the next launch
  return fits && ctas >= 1 && multiprocessors <= multiprocessors_there;
}

bool divide_product(PassPhase& phase, int m, int multiprocessors) {
  const int shares = std::max(1, std::min(m, multiprocessors / std::max(1, phase.ranks)));
  phase.rows_of_a_job = (m + shares - 1) / shares;
  phase.jobs = (m + phase.rows_of_a_job - 1) / phase.rows_of_a_job * phase.ranks;
  if (phase.k < kStage || phase.k % kStage != 0) return false;
  if (phase.gated && (phase.count != 2 || phase.weights[0].n != phase.weights[1].n || phase.weights[0].n % 8 != 0)) return false;
  bool can_share = m > 4;
  for (int i = 0; i < phase.count; ++i) {
    phase.first_row[i + 1] = phase.first_row[i] + phase.weights[i].n;
    phase.first_strip[i + 1] = phase.first_strip[i] + phase.weights[i].n / kStrip;
    if (!phase.gated && phase.weights[i].n % kStrip != 0) return false;
    can_share = can_share && phase.weights[i].n % (2 * kStrip) == 0;
  }
  const int strips = phase.gated ? phase.weights[0].n / (kStrip / 2) : phase.first_strip[phase.count];
  // The longest time of a CTA, in stages. x costs as much as a strip.
  const auto time = [&](int share) { return (strips / share + multiprocessors - 1) / multiprocessors * (share + 1); };
  phase.share = can_share && time(2) < time(1) ? 2 : 1;
  phase.groups = strips / phase.share;
  return true;
}

int attention_splits(int m, int heads, int kv_heads, int multiprocessors) {
  return std::max(1, multiprocessors / static_cast<int>(pairs_of(m, heads, kv_heads)));
}

int64_t pass_partial_floats(const DecodePass& pass, int multiprocessors) {
  return pairs_of(pass.m, pass.heads, pass.kv_heads) * attention_splits(pass.m, pass.heads, pass.kv_heads, multiprocessors) *
         kHeads *
         (pass.head_dim <= 64    ? 68
          : pass.head_dim <= 128 ? 132
                                 : 260);
}

int64_t pass_counters(const DecodePass& pass) { return kCome + pairs_of(pass.m, pass.heads, pass.kv_heads); }

cudaError_t decode_pass(const DecodePass& pass, int multiprocessors, Stream stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(multiprocessors));
  config.blockDim = kPassThreads;
  const Kernel kernel = kernel_of(pass.m, pass.head_dim);
  config.dynamicSmemBytes = kernel.shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  DecodePass own = pass;
  void* arguments[] = {&own};
  return cudaLaunchKernelExC(&config, kernel.function, arguments);
}

}  // namespace qlorapp::cuda
