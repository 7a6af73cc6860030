// SPDX-License-Identifier: Apache-2.0
#include "element.cuh"
#include "lora_augment.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 256;

/// The first `right` threads write the N × P columns at the right, the others the P × K rows below. Both are a hundredth of the
/// weights that stand between them.
template <class T>
__global__ void __launch_bounds__(kThreads) augment(T* workspace, const Augmentation borders) {
  const int64_t right = int64_t{borders.out} * borders.spare;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float value[1];
  if (i < right) {
    const int row = static_cast<int>(i / borders.spare), rank = static_cast<int>(i % borders.spare);
    border_at_the_right(borders, row, rank, value);
    workspace[row * borders.row_stride + borders.in + rank] = from_float<T>(value[0]);
    return;
  }
  const int64_t j = i - right;
  if (j >= int64_t{borders.spare} * borders.in) return;
  const int rank = static_cast<int>(j / borders.in), column = static_cast<int>(j % borders.in);
  border_below(borders, rank, column, value);
  workspace[(int64_t{borders.out} + rank) * borders.row_stride + column] = from_float<T>(value[0]);
}

}  // namespace

cudaError_t lora_augment(void* workspace, Float dtype, const Augmentation& borders, Stream stream) {
  const int64_t elements = (int64_t{borders.out} + borders.in) * borders.spare;
  if (elements == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((elements + kThreads - 1) / kThreads);
  switch (dtype) {
    case Float::kFloat32:
      augment<<<blocks, kThreads, 0, stream>>>(static_cast<float*>(workspace), borders);
      break;
    case Float::kFloat16:
      augment<<<blocks, kThreads, 0, stream>>>(static_cast<__half*>(workspace), borders);
      break;
    case Float::kBFloat16:
      augment<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(workspace), borders);
      break;
  }
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
