// SPDX-License-Identifier: Apache-2.0
/// What every block of one micro-batch shares: where its rows begin, how positions turn, and the key of its random numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/philox.hpp"
#include "nn/input_offload.hpp"
#include "qlorapp/nn/memory_settings.hpp"

namespace qlorapp {

class WeightStream;

/// Cosines and sines of the rotary embedding, float32 (positions, head_dim / 2), grown to the longest row seen so far.
class RopeTable {
 public:
  RopeTable() = default;
  /// @param inverse_frequencies  (head_dim / 2) float32, after the scaling rule of the config.
  /// @param attention_scale      factor on both tables; 1 for the default and llama3 rules.
  RopeTable(at::Tensor inverse_frequencies, double attention_scale);
  /// Makes the tables cover positions [0, length). Allocates only when they must grow.
  void reserve(int64_t length);
  [[nodiscard]] const at::Tensor& cos() const { return cos_; }
  [[nodiscard]] const at::Tensor& sin() const { return sin_; }

 private:
  at::Tensor inverse_frequencies_, cos_, sin_;
  double attention_scale_ = 1.0;
};

struct StepContext {
  at::Tensor cos, sin;                    ///< float32 (positions, head_dim / 2).
  at::Tensor positions;                   ///< (M) int64.
  std::vector<int64_t> row_starts;        ///< R + 1; attention never crosses a row.
  uint64_t seed = 0;                      ///< Key of the run's dropout masks.
  uint32_t micro_step = 0;                ///< Micro-batches since the start of the run.
  bool training = true;                   ///< Dropout is off when false.
  bool stacked = false;                   ///< Multiply projections that share an input as one (projection_stack.hpp): a GPU's way.
  bool deterministic = false;             ///< The same bits in every run, on a GPU too.
  bool float8 = false;                    ///< Stacked projections multiply their frozen weights in eight bits (float8_stack.hpp).
  std::shared_ptr<InputOffload> offload;  ///< Takes inputs that are kept on the host; null on a CPU and where none are.
  std::shared_ptr<WeightStream> weights;  ///< Brings the blocks' frozen weights; null if they are on the device.
  MemorySettings memory;
  int64_t first_row = 0;  ///< Of the rows at hand among the micro-batch's: where a tile's part of a dropout mask begins.

  /// @param site  a number that no other mask of the model shares: block * 16 + projection.
  /// @param width  of the input that is masked.
  [[nodiscard]] DropoutKey dropout_key(uint32_t site, int64_t width) const {
    return {.seed = seed, .micro_step = micro_step, .site = site, .first = static_cast<uint64_t>(first_row * width)};
  }
};

}  // namespace qlorapp
