// SPDX-License-Identifier: Apache-2.0
/// What every block of one micro-batch shares: where its rows begin, how positions turn, and the key of its random numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/philox.hpp"
#include "nn/input_offload.hpp"
#include "qlorapp/format/rope.hpp"
#include "qlorapp/nn/memory_settings.hpp"

namespace qlorapp {

class DecodeAdapters;
class InputSquares;
class WeightStream;

/// How the heads of some layers turn: float32 (positions, width / 2), the factor of attention multiplied in.
struct Rotation {
  at::Tensor cos, sin;
  at::Tensor query_scale;  ///< float32 (positions): a factor of queries; undefined: none.
};

/// The rotations of a model, each grown to the longest row seen so far.
class RopeTables {
 public:
  RopeTables() = default;
  RopeTables(const std::vector<format::RopeSettings>& ropes, at::Device device);
  /// For a batch whose longest row has this length, in the order of ModelConfig::ropes. Allocates only where a table must grow, or was of
  /// another length and depends on it.
  const std::vector<Rotation>& reserve(int64_t length);
  /// Of the last reserve().
  [[nodiscard]] const std::vector<Rotation>& last() const { return last_; }

 private:
  struct Table {
    format::RopeSettings rope;
    Rotation rotation;
    int64_t length = 0;  ///< That the frequencies were taken for; 0: any that is not long for them.
  };
  void fill(Table& table, int64_t length, int64_t positions) const;

  std::vector<Table> tables_;
  std::vector<Rotation> last_;
  at::Device device_ = at::kCPU;
};

/// Up to so many tokens of a pass reading the weights is all: a GPU multiplies each projection on its own then.
inline constexpr int64_t kFewTokens = 64;

struct StepContext {
  std::vector<Rotation> rotations;        ///< By ModelConfig::ropes.
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
  std::shared_ptr<InputSquares> squares = nullptr;  ///< Sees the inputs of linear layers; null: nobody asks.
  bool few = false;                                 ///< There are few tokens, and nothing is kept for backward.
  std::shared_ptr<const DecodeAdapters> adapters =
      nullptr;  ///< With `few`: of the model; null: none are in use, or the blocks' own.
  MemorySettings memory;
  int64_t first_row = 0;  ///< Of the rows at hand among the micro-batch's: where a tile's part of a dropout mask begins.

  /// @param site  a number that no other mask of the model shares: block * 16 + projection.
  /// @param width  of the input that is masked.
  [[nodiscard]] DropoutKey dropout_key(uint32_t site, int64_t width) const {
    return {.seed = seed, .micro_step = micro_step, .site = site, .first = static_cast<uint64_t>(first_row * width)};
  }
};

}  // namespace qlorapp
