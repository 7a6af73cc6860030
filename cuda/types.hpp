// SPDX-License-Identifier: Apache-2.0
/// What every kernel header of this folder shares: element types and the stream, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace qlorapp::cuda {

enum class Float { kFloat32, kFloat16, kBFloat16 };

using Stream = CUstream_st*;  // cudaStream_t

}  // namespace qlorapp::cuda
