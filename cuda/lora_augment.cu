// SPDX-License-Identifier: Apache-2.0
#include "element.cuh"
#include "lora_augment.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 256;

/// The first N × P threads write the columns at the right, the others the P × K rows below.
template <class T>
__global__ void __launch_bounds__(kThreads)
    augment(T* right, int64_t right_stride, T* below, int64_t below_stride, const Augmentation borders) {
  const int64_t count = int64_t{borders.out} * borders.spare;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float value[1];
  if (i < count) {
    const int row = static_cast<int>(i / borders.spare), rank = static_cast<int>(i % borders.spare);
    border_at_the_right(borders, row, rank, value);
    right[row * right_stride + rank] = from_float<T>(value[0]);
    return;
  }
  const int64_t j = i - count;
  if (j >= int64_t{borders.spare} * borders.in) return;
  const int rank = static_cast<int>(j / borders.in), column = static_cast<int>(j % borders.in);
  border_below(borders, rank, column, value);
  below[rank * below_stride + column] = from_float<T>(value[0]);
}

template <class T>
void launch(BorderRows right, BorderRows below, const Augmentation& borders, unsigned blocks, Stream stream) {
  augment<<<blocks, kThreads, 0, stream>>>(static_cast<T*>(right.data), right.row_stride, static_cast<T*>(below.data),
                                           below.row_stride, borders);
}

/// Where the borders of a workspace begin: behind the K columns of its weights, and under their N rows.
template <class T>
cudaError_t around(void* workspace, Float dtype, const Augmentation& borders, Stream stream) {
  T* const first = static_cast<T*>(workspace);
  return lora_borders({first + borders.in, borders.row_stride}, {first + borders.out * borders.row_stride, borders.row_stride},
                      dtype, borders, stream);
}

}  // namespace

cudaError_t lora_borders(BorderRows right, BorderRows below, Float dtype, const Augmentation& borders, Stream stream) {
  const int64_t elements = (int64_t{borders.out} + borders.in) * borders.spare;
  if (elements == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((elements + kThreads - 1) / kThreads);
  switch (dtype) {
    case Float::kFloat32:
      launch<float>(right, below, borders, blocks, stream);
      break;
    case Float::kFloat16:
      launch<__half>(right, below, borders, blocks, stream);
      break;
    case Float::kBFloat16:
      launch<__nv_bfloat16>(right, below, borders, blocks, stream);
      break;
  }
  return cudaGetLastError();
}

cudaError_t lora_augment(void* workspace, Float dtype, const Augmentation& borders, Stream stream) {
  return dtype == Float::kFloat32 ? around<float>(workspace, dtype, borders, stream)
                                  : around<uint16_t>(workspace, dtype, borders, stream);
}

}  // namespace qlorapp::cuda
