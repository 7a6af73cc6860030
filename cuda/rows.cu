// SPDX-License-Identifier: Apache-2.0
#include "rows.hpp"

#include "pack.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 128;

/// A row a block.
template <class T, bool scatter>
__global__ void copy_rows_kernel(const T* source, int64_t source_stride, T* target, int64_t target_stride, const int64_t* index,
                                 int64_t indexed_rows, int64_t width, bool whole) {
  const int64_t row = blockIdx.x, other = index[row];
  const bool inside = other >= 0 && other < indexed_rows;
  if (scatter && !inside) return;
  const T* from = source + (scatter ? row : inside ? other : 0) * source_stride;
  T* to = target + (scatter ? other : row) * target_stride;
  if (inside && whole) {
    for (int64_t i = threadIdx.x * kPack<T>; i < width; i += kThreads * kPack<T>) store_raw(to + i, load_raw(from + i));
  } else {
    for (int64_t i = threadIdx.x; i < width; i += kThreads) to[i] = inside ? from[i] : narrow<T>(__int_as_float(0x7fc00000));
  }
}

template <bool scatter>
cudaError_t copy_rows(Float type, const void* source, int64_t source_stride, void* target, int64_t target_stride,
                      const int64_t* index, int64_t indexed_rows, int64_t rows, int64_t width, Stream stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    const auto* from = static_cast<const T*>(source);
    auto* to = static_cast<T*>(target);
    const bool whole = width % kPack<T> == 0 && aligned(from, source_stride) && aligned(to, target_stride);
    copy_rows_kernel<T, scatter><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(from, source_stride, to, target_stride,
                                                                                       index, indexed_rows, width, whole);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t gather_rows(Float type, const void* source, int64_t source_stride, int64_t source_rows, const int64_t* index, void* out,
                        int64_t out_stride, int64_t rows, int64_t width, Stream stream) {
  return copy_rows<false>(type, source, source_stride, out, out_stride, index, source_rows, rows, width, stream);
}

cudaError_t scatter_rows(Float type, const void* source, int64_t source_stride, const int64_t* index, void* target,
                         int64_t target_stride, int64_t target_rows, int64_t rows, int64_t width, Stream stream) {
  return copy_rows<true>(type, source, source_stride, target, target_stride, index, target_rows, rows, width, stream);
}

}  // namespace qlorapp::cuda
