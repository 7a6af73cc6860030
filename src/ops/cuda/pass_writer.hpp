// SPDX-License-Identifier: Apache-2.0
/// The phases of a model's pass of one token a row (cuda/decode_pass.hpp), for one launch and for several.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/decode_pass.hpp"
#include "ops/decode_pass.hpp"

namespace qlorapp::ops::gpu {

[[nodiscard]] int multiprocessors();

/// Writes them down, with the memory that they share.
class PassWriter {
 public:
  PassWriter(const PassModel& model, int64_t rows, const at::TensorOptions& options);

  /// @returns false where a layer has no kernel.
  bool write();

  std::vector<cuda::PassPhase> phases;
  at::Tensor stream;             ///< (rows, D)
  std::vector<at::Tensor> held;  ///< Workspaces.
  int64_t most_ranks = 0;

 private:
  at::Tensor matrix(int64_t columns);
  at::Tensor squares();
  /// @param norm  in front of it; undefined: none.
  cuda::PassPhase product(const PassGroup& group, const at::Tensor& x, const at::Tensor& norm);
  bool add(cuda::PassPhase& phase);
  /// Sets what the next norm reads of this phase. @param norm  its weight; undefined: the next part has no norm.
  void leave(cuda::PassPhase& phase, const at::Tensor& norm);
  /// stream += factor · norm(x), or the stream as it is where x is undefined.
  void write_sum(const at::Tensor& after, const at::Tensor& before_next, bool is_last = false);
  bool write_branch(const PassGroup& group, const at::Tensor& x, const at::Tensor& after, const at::Tensor& before_next,
                    bool is_last);
  void write_attention(const PassBlock& block);

  const PassModel& model_;
  const int64_t rows_;
  const at::TensorOptions options_;
  int64_t width_ = 0;
  int formed_ = 0;
  bool nested_ = false, is_known_ = true;
  at::Tensor input_, branch_, qkv_, attended_, h_, squares_, branch_squares_;
};

/// The pass as kernels take it: what is not a phase, u and the memory between CTAs, from numbers (ops::make_decode_pass).
[[nodiscard]] cuda::DecodePass described(const PassModel& model, const at::Tensor& numbers);

/// 9 to 128 rows; null where there is no kernel.
[[nodiscard]] std::unique_ptr<DecodePass> make_wide_pass(const PassModel& model, const at::Tensor& numbers);

}  // namespace qlorapp::ops::gpu
