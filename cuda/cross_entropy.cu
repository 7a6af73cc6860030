// SPDX-License-Identifier: Apache-2.0
#include "cross_entropy.hpp"

#include <algorithm>
#include <cfloat>
#include <numbers>

#include <cooperative_groups.h>

#include "early_launch.cuh"
#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 1024;

/// e^(x − m). For float in base e and exact to an ulp or two. For 16-bit logits as 2^(x·log₂e − m'), one multiply-add and one
/// instruction: the argument's rounding, 2^-19 at a distance of 40, is far below the resolution of the logits.
template <class T>
struct Exponential {
  static constexpr bool kBase2 = !std::is_same_v<T, float>;
  static constexpr float kLog2E = std::numbers::log2e_v<float>, kLn2 = std::numbers::ln2_v<float>;
  __device__ static float scaled(float x) { return kBase2 ? x * kLog2E : x; }
  __device__ static float of_difference(float x, float m) {
    if constexpr (kBase2) {
      float result;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(x, kLog2E, -m)));
      return result;
    } else {
      return expf(x - m);
    }
  }
  /// e^(m − n) of two maxima in the scale of `scaled`.
  __device__ static float of_maxima(float m, float n) { return kBase2 ? exp2f(m - n) : expf(m - n); }
  __device__ static float natural(float m) { return kBase2 ? m * kLn2 : m; }
};

/// The running maximum (scaled) and sum of exponentials.
template <class T>
struct Online {
  float m = -FLT_MAX, sum = 0;

  __device__ void raise(float highest) {
    if (highest <= m) return;
    sum *= Exponential<T>::of_maxima(m, highest);
    m = highest;
  }
  template <int n>
  __device__ void add(const float (&values)[n]) {
    float highest = values[0];
#pragma unroll
    for (int j = 1; j < n; ++j) highest = fmaxf(highest, values[j]);
    raise(Exponential<T>::scaled(highest));
#pragma unroll
    for (int j = 0; j < n; ++j) sum += Exponential<T>::of_difference(values[j], m);
  }
};

template <class T>
struct Arguments {
  T* logits;
  int64_t stride;
  const int64_t* targets;
  float* losses;
  const float* grad_scale;
  int64_t vocabulary;
  int kept;  // packs of a row that shared memory holds: row_kernel
  float logit_factor, logit_cap;
};

/// Maps a product to its logit (value), and gives the derivative there (slope). kPlain: logits are the products.
template <bool kPlain>
struct Shape {
  float factor, cap;

  __device__ float value(float z) const {
    if constexpr (kPlain) return z;
    else return cap == 0.0F ? z * factor : cap * tanhf(z * factor / cap);
  }
  __device__ float slope(float value) const {
    if constexpr (kPlain) return 1.0F;
    const float t = cap == 0.0F ? 0.0F : value / cap;
    return factor * (1.0F - t * t);
  }
  template <int n>
  __device__ void apply(float (&values)[n]) const {
    if constexpr (!kPlain) {
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = value(values[j]);
    }
  }
};

template <class T>
__device__ inline float loss_of(const Online<T>& row, float at_target) {
  return logf(row.sum) + (Exponential<T>::natural(row.m) - at_target);
}

/// (softmax − onehot)·scale of a row whose maximum and sum are known.
template <class T, bool kPlain>
struct RowGradient {
  float m, factor, at_target;
  int target;
  Shape<kPlain> shape;

  __device__ RowGradient(const Online<T>& row, float logit_of_target, int64_t target, const float* grad_scale, Shape<kPlain> shape)
      : m{row.m}, target{static_cast<int>(target)}, shape{shape} {
    const float scale = grad_scale == nullptr ? 1.0F : *grad_scale;
    const float inverse = 1.0F / row.sum;
    factor = inverse * scale;
    at_target = (Exponential<T>::of_difference(logit_of_target, m) * inverse - 1.0F) * scale;
    if constexpr (!kPlain) at_target *= shape.slope(logit_of_target);
  }
  __device__ float off_target(float product) const {
    const float logit = shape.value(product), gradient = Exponential<T>::of_difference(logit, m) * factor;
    if constexpr (kPlain) return gradient;
    else return gradient * shape.slope(logit);
  }
  __device__ void store(T* logits, int i, uint4 raw) const {  // the pack i of the row
    constexpr int n = kPack<T>;
    float values[n];
    unpack<T>(raw, values);
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = off_target(values[j]);
    if (target / n == i) {
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = target % n == j ? at_target : values[j];
    }
    store_pack(logits + static_cast<int64_t>(i) * n, values);
  }
  __device__ void store_one(T* logits, int i, float product) const {
    logits[i] = narrow<T>(i == target ? at_target : off_target(product));
  }
};

template <class T>
__device__ inline bool has_no_target(const Arguments<T>& a, int64_t target) {
  return target < 0 || target >= a.vocabulary;
}
__device__ inline float loss_without_target(int64_t target) { return target < 0 ? 0.0F : __int_as_float(0x7fc00000); }

/// The blocks that share a row: a cluster, which sm_90 and newer have; one block anywhere else.
struct Sharers {
#if __CUDA_ARCH__ >= 900
  __device__ static int count() { return static_cast<int>(cooperative_groups::cluster_group::num_blocks()); }
  __device__ static int rank() { return static_cast<int>(cooperative_groups::cluster_group::block_rank()); }
  __device__ static void arrive() { cooperative_groups::cluster_group::barrier_arrive(); }
  __device__ static void wait() { cooperative_groups::cluster_group::barrier_wait(); }
  __device__ static float2* of_block(float2* own, int rank) {
    return cooperative_groups::cluster_group::map_shared_rank(own, rank);
  }
#else
  __device__ static int count() { return 1; }
  __device__ static int rank() { return 0; }
  __device__ static void arrive() {}
  __device__ static void wait() { __syncthreads(); }
  __device__ static float2* of_block(float2* own, int) { return own; }
#endif
};

constexpr int kHeldPacks = 16;     // of a thread: 64 of its 80 registers
constexpr int kHeldThreads = 256;  // of a block, at most; three such fill a multiprocessor
constexpr int kMostSharers = 8;    // what every GPU with clusters takes

/// A row in the registers of the blocks that share it: all of it is on its way at once, and while one row waits for its sum,
/// another that the multiprocessor holds moves.
template <class T, bool gradient, bool kPlain>
__global__ void __launch_bounds__(kHeldThreads, 3) held_row_kernel(const Arguments<T> a) {
  constexpr int n = kPack<T>;
  constexpr int kWarps = kHeldThreads / 32;
  __shared__ float2 parts[kMostSharers * kWarps];  // maximum and sum of each warp of the row
  const int sharers = Sharers::count(), rank = Sharers::rank();
  const int64_t row_index = blockIdx.x / static_cast<unsigned>(sharers);
  const int64_t target = a.targets[row_index];
  T* logits = a.logits + row_index * a.stride;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int packs = static_cast<int>(a.vocabulary / n);
  const int first = rank * threads + thread, step = sharers * threads;
  const int odd = packs * n + thread;  // of the first block: the last few elements of an odd vocabulary
  const bool has_odd = rank == 0 && odd < a.vocabulary;
  if (has_no_target(a, target)) {
    if (rank == 0 && thread == 0) a.losses[row_index] = loss_without_target(target);
    if constexpr (gradient) {
      for (int i = first; i < packs; i += step) store_raw(logits + static_cast<int64_t>(i) * n, make_uint4(0, 0, 0, 0));
      if (has_odd) logits[odd] = narrow<T>(0.0F);
    }
    return;
  }
  Sharers::arrive();  // no block writes into another's memory before that has begun
  const Shape<kPlain> shape{a.logit_factor, a.logit_cap};
  const float at_target = shape.value(widen(logits[target]));
  uint4 held[kHeldPacks];
#pragma unroll
  for (int j = 0; j < kHeldPacks; ++j) {
    if (first + j * step < packs) held[j] = load_raw(logits + static_cast<int64_t>(first + j * step) * n);
  }
  Online<T> mine;
#pragma unroll
  for (int j = 0; j < kHeldPacks; ++j) {
    if (first + j * step >= packs) continue;
    float values[n];
    unpack<T>(held[j], values);
    shape.apply(values);
    mine.add(values);
  }
  if (has_odd) mine.add({shape.value(widen(logits[odd]))});
  const float warp_m = across_warp<Max>(mine.m);
  const float warp_sum = across_warp<Sum>(mine.sum * Exponential<T>::of_maxima(mine.m, warp_m));
  const int lane = thread % 32, warps = threads / 32;
  Sharers::wait();
  if (lane < sharers) Sharers::of_block(parts, lane)[rank * warps + thread / 32] = make_float2(warp_m, warp_sum);
  Sharers::arrive();
  Sharers::wait();  // behind it, nobody reads logits that are not its own or writes into another's memory
  Online<T> row;
  for (int i = lane; i < sharers * warps; i += 32) row.m = fmaxf(row.m, parts[i].x);
  row.m = across_warp<Max>(row.m);
  for (int i = lane; i < sharers * warps; i += 32) row.sum += parts[i].y * Exponential<T>::of_maxima(parts[i].x, row.m);
  row.sum = across_warp<Sum>(row.sum);
  if (rank == 0 && thread == 0) a.losses[row_index] = loss_of(row, at_target);
  if constexpr (gradient) {
    const RowGradient<T, kPlain> result{row, at_target, target, a.grad_scale, shape};
    int again = first;
    asm volatile("" : "+r"(again));  // addresses are formed once more rather than kept: registers are what holds the row
#pragma unroll
    for (int j = 0; j < kHeldPacks; ++j) {
      if (again + j * step < packs) result.store(logits, again + j * step, held[j]);
    }
    if (has_odd) result.store_one(logits, odd, widen(logits[odd]));
  }
}

/// One block a row, for what registers do not hold and for odd alignments. kWhole: 16 bytes at a time, most of which stay in
/// shared memory, the last few elements of an odd vocabulary one by one.
template <class T, bool gradient, bool kWhole, bool kPlain>
__global__ void __launch_bounds__(kThreads, 1) row_kernel(const Arguments<T> a) {
  extern __shared__ uint4 kept[];
  constexpr int n = kPack<T>;
  constexpr int kFlight = 4;
  const int64_t target = a.targets[blockIdx.x];
  T* logits = a.logits + static_cast<int64_t>(blockIdx.x) * a.stride;
  const int packs = kWhole ? static_cast<int>(a.vocabulary / n) : 0;
  const int thread = static_cast<int>(threadIdx.x);
  const int odd = packs * n + thread;
  if (has_no_target(a, target)) {
    if (thread == 0) a.losses[blockIdx.x] = loss_without_target(target);
    if constexpr (gradient) {
      for (int i = thread; i < packs; i += kThreads) store_raw(logits + static_cast<int64_t>(i) * n, make_uint4(0, 0, 0, 0));
      for (int i = odd; i < a.vocabulary; i += kThreads) logits[i] = narrow<T>(0.0F);
    }
    return;
  }
  const Shape<kPlain> shape{a.logit_factor, a.logit_cap};
  const float at_target = shape.value(widen(logits[target]));  // before anything is written: see the barriers of across_block
  Online<T> mine;
  for (int base = thread; base < packs; base += kFlight * kThreads) {
    uint4 raw[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int i = base + f * kThreads;
      if (i < packs) raw[f] = load_raw(logits + static_cast<int64_t>(i) * n);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int i = base + f * kThreads;
      if (i >= packs) continue;
      if (i < a.kept) kept[i] = raw[f];
      float values[n];
      unpack<T>(raw[f], values);
      shape.apply(values);
      mine.add(values);
    }
  }
  for (int i = odd; i < a.vocabulary; i += kThreads) mine.add({shape.value(widen(logits[i]))});
  Online<T> row;
  row.m = across_block<Max>(mine.m, -FLT_MAX);
  row.sum = across_block<Sum>(mine.sum * Exponential<T>::of_maxima(mine.m, row.m), 0.0F);
  if (thread == 0) a.losses[blockIdx.x] = loss_of(row, at_target);
  if constexpr (gradient) {
    const RowGradient<T, kPlain> result{row, at_target, target, a.grad_scale, shape};
    for (int base = thread; base < packs; base += kFlight * kThreads) {
      uint4 raw[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        const int i = base + f * kThreads;
        if (i < packs) raw[f] = i < a.kept ? kept[i] : load_raw(logits + static_cast<int64_t>(i) * n);
      }
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        const int i = base + f * kThreads;
        if (i < packs) result.store(logits, i, raw[f]);
      }
    }
    for (int i = odd; i < a.vocabulary; i += kThreads) result.store_one(logits, i, widen(logits[i]));
  }
}

/// `blocks` blocks, `cluster` of which form one.
struct ClusterLaunch {
  ClusterLaunch(int cluster, int64_t blocks, int threads, Stream stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = static_cast<unsigned>(blocks);
    config.blockDim = static_cast<unsigned>(threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
};

/// How many blocks share a row in their registers; 0 if it is to stay out of them.
template <class T, bool gradient, bool kPlain>
int sharers_of_row(int64_t vocabulary) {
  constexpr int64_t kBlock = int64_t{kHeldPacks} * kHeldThreads;
  const int64_t blocks = (vocabulary / kPack<T> + kBlock - 1) / kBlock;
  if (blocks <= 1) return static_cast<int>(blocks);
  if (blocks > kMostSharers) return 0;
  static std::atomic<signed char> known[64];
  const bool clusters = once_a_device(known, [] {
    void (*const kernel)(Arguments<T>) = held_row_kernel<T, gradient, kPlain>;
    ClusterLaunch largest(kMostSharers, kMostSharers, kHeldThreads, nullptr);
    int resident = 0;
    return architecture_of_code(reinterpret_cast<const void*>(kernel)) >= 90 &&
           cudaOccupancyMaxActiveClusters(&resident, kernel, &largest.config) == cudaSuccess && resident > 0;
  });
  return clusters ? static_cast<int>(blocks) : 0;
}

template <class T, bool gradient, bool kPlain>
cudaError_t launch_held(const Arguments<T>& a, int sharers, int64_t rows, Stream stream) {
  const auto packs = static_cast<int>(a.vocabulary / kPack<T>), held = sharers * kHeldPacks;
  const int threads = ((packs + held - 1) / held + 31) / 32 * 32;
  const ClusterLaunch launch(sharers, rows * sharers, threads, stream);
  return cudaLaunchKernelEx(&launch.config, held_row_kernel<T, gradient, kPlain>, a);
}

template <class T, bool gradient, bool kWhole, bool kPlain>
cudaError_t launch(Arguments<T> a, int64_t rows, Stream stream) {
  size_t shared = 0;
  if constexpr (kWhole) {
    if (const int sharers = sharers_of_row<T, gradient, kPlain>(a.vocabulary); sharers > 0)
      return launch_held<T, gradient, kPlain>(a, sharers, rows, stream);
  }
  if (gradient && kWhole) {  // the loss alone reads a row once
    int device = 0, limit = 0;
    if (const auto error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (const auto error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); error != cudaSuccess)
      return error;
    constexpr int kStatic = 1024;  // across_block's own, and what the driver reserves
    a.kept = static_cast<int>(std::min<int64_t>(a.vocabulary / kPack<T>, (limit - 2 * kStatic) / 16));
    shared = static_cast<size_t>(a.kept) * 16;
    const auto error = cudaFuncSetAttribute(row_kernel<T, gradient, kWhole, kPlain>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  row_kernel<T, gradient, kWhole, kPlain><<<static_cast<unsigned>(rows), kThreads, shared, stream>>>(a);
  return cudaGetLastError();
}

/// The running maximum, sums of exponentials and of exponentials times logits, and the maximum before the target.
struct Entropy {
  float m = -FLT_MAX, sum = 0, weighted = 0, before = -FLT_MAX;

  __device__ void add(float x, bool is_before) {
    if (x > m) {
      const float fade = expf(m - x);
      sum *= fade;
      weighted *= fade;
      m = x;
    }
    const float e = expf(x - m);
    sum += e;
    weighted += e * x;
    if (is_before) before = fmaxf(before, x);
  }
};

template <class T, bool kPlain>
__global__ void __launch_bounds__(kThreads, 1)
    statistics_kernel(const Arguments<T> a, int packs, float* statistics, int64_t pitch) {
  constexpr int n = kPack<T>;
  const int64_t target = a.targets[blockIdx.x];
  const int thread = static_cast<int>(threadIdx.x);
  float* const entropy = statistics + blockIdx.x;
  if (has_no_target(a, target)) {
    if (thread == 0) entropy[0] = entropy[pitch] = 0.0F;
    return;
  }
  const T* const logits = a.logits + static_cast<int64_t>(blockIdx.x) * a.stride;
  const Shape<kPlain> shape{a.logit_factor, a.logit_cap};
  Entropy mine;
  for (int i = thread; i < packs; i += kThreads) {
    float values[n];
    unpack<T>(load_raw(logits + static_cast<int64_t>(i) * n), values);
    shape.apply(values);
#pragma unroll
    for (int j = 0; j < n; ++j) mine.add(values[j], static_cast<int64_t>(i) * n + j < target);
  }
  for (int i = packs * n + thread; i < a.vocabulary; i += kThreads) mine.add(shape.value(widen(logits[i])), i < target);
  const float m = across_block<Max>(mine.m, -FLT_MAX), before = across_block<Max>(mine.before, -FLT_MAX);
  const float fade = expf(mine.m - m);
  const float sum = across_block<Sum>(mine.sum * fade, 0.0F), weighted = across_block<Sum>(mine.weighted * fade, 0.0F);
  if (thread != 0) return;
  const float at_target = shape.value(widen(logits[target]));
  entropy[0] = logf(sum) + (m - weighted / sum);
  entropy[pitch] = at_target >= m && (target == 0 || at_target > before) ? 1.0F : 0.0F;
}

__global__ void sum_kernel(const float* losses, int64_t rows, float* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) sum += static_cast<double>(losses[i]);
  sum = across_block<Sum>(sum, 0.0);
  if (threadIdx.x == 0) *total = static_cast<float>(sum);
}

/// One block; each round takes kThreads rows, and a warp's ballot and a sum over the warps before it place their entries.
__global__ void compact_kernel(const int64_t* targets, int64_t rows, int64_t count, int64_t* index, int64_t* compact) {
  __shared__ int counts[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int64_t filled = 0;
  for (int64_t begin = 0; begin < rows; begin += kThreads) {
    const int64_t row = begin + threadIdx.x;
    const int64_t target = row < rows ? targets[row] : -1;
    const unsigned present = __ballot_sync(0xffffffffU, target >= 0);
    if (lane == 0) counts[warp] = __popc(present);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < warp ? counts[w] : 0;
      all += counts[w];
    }
    const int64_t at = filled + before + __popc(present & ((1U << lane) - 1U));
    if (target >= 0 && at < count) {
      index[at] = row;
      compact[at] = target;
    }
    filled += all;
    __syncthreads();
  }
  for (int64_t i = filled + threadIdx.x; i < count; i += kThreads) index[i] = compact[i] = -1;
  if (filled != count && count > 0 && threadIdx.x == 0) compact[0] = INT64_MAX;  // ordered after the loop's last barrier
}

}  // namespace

cudaError_t cross_entropy(Float type, void* logits, int64_t stride, const int64_t* targets, float* losses, const float* grad_scale,
                          bool gradient, int64_t rows, int64_t vocabulary, float logit_factor, float logit_cap, Stream stream) {
  if (rows == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    const Arguments<T> a{static_cast<T*>(logits), stride, targets, losses, grad_scale, vocabulary, 0, logit_factor, logit_cap};
    const bool whole = aligned(a.logits, stride) && vocabulary >= kPack<T>;
    const auto with = [&]<bool kPlain>() {
      if (gradient) return whole ? launch<T, true, true, kPlain>(a, rows, stream) : launch<T, true, false, kPlain>(a, rows, stream);
      return whole ? launch<T, false, true, kPlain>(a, rows, stream) : launch<T, false, false, kPlain>(a, rows, stream);
    };
    const bool plain = logit_factor == 1.0F && logit_cap == 0.0F;
    return plain ? with.template operator()<true>() : with.template operator()<false>();
  });
}

cudaError_t row_statistics(Float type, const void* logits, int64_t stride, const int64_t* targets, float* statistics, int64_t pitch,
                           int64_t rows, int64_t vocabulary, float logit_factor, float logit_cap, Stream stream) {
  if (rows == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    T* const read = const_cast<T*>(static_cast<const T*>(logits));  // not written to
    const Arguments<T> a{read, stride, targets, nullptr, nullptr, vocabulary, 0, logit_factor, logit_cap};
    const int packs = aligned(read, stride) ? static_cast<int>(vocabulary / kPack<T>) : 0;
    const auto grid = static_cast<unsigned>(rows);
    if (logit_factor == 1.0F && logit_cap == 0.0F) {
      statistics_kernel<T, true><<<grid, kThreads, 0, stream>>>(a, packs, statistics, pitch);
    } else {
      statistics_kernel<T, false><<<grid, kThreads, 0, stream>>>(a, packs, statistics, pitch);
    }
    return cudaGetLastError();
  });
}

cudaError_t sum_losses(const float* losses, int64_t rows, float* total, Stream stream) {
  sum_kernel<<<1, kThreads, 0, stream>>>(losses, rows, total);
  return cudaGetLastError();
}

cudaError_t compact_targets(const int64_t* targets, int64_t rows, int64_t count, int64_t* index, int64_t* compact, Stream stream) {
  compact_kernel<<<1, kThreads, 0, stream>>>(targets, rows, count, index, compact);
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
