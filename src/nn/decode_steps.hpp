// SPDX-License-Identifier: Apache-2.0
/// Forward passes of one token a row over a cache: on a GPU launches that are recorded once for each number of rows, and replayed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/block/block_part.hpp"
#include "nn/decode_adapters.hpp"
#include "ops/decode_pass.hpp"
#include "ops/launch_graph.hpp"

namespace qlorapp {

class CausalLM;
struct GenerationCache;

class DecodeSteps {
 public:
  /// Hidden states after the last norm, (R, D).
  /// @param tokens  (R) int64 on the model's device.  @param rows  of the cache, whose lengths count these tokens already.
  [[nodiscard]] at::Tensor forward(CausalLM& model, const at::Tensor& tokens, std::span<const int64_t> rows,
                                   GenerationCache& cache);
  /// For a pass of the model as it is now, with the values that the adapter has, or, with `constant`, had when this was asked first.
  [[nodiscard]] std::shared_ptr<DecodeAdapters> adapters(const CausalLM& model, bool constant);

  /// Lets go of recorded passes, which hold the cache's keys and values.
  void forget();

 private:
  /// Of a number of rows. Rows that are not needed repeat the first.
  struct Step {
    at::Tensor tokens;   ///< (rows) int64.
    at::Tensor numbers;  ///< (6, rows) int64: position and slot of the token; start, length and what is shared of the row.
    at::Tensor hidden;   ///< (rows, D).
    std::unique_ptr<ops::DecodePass> pass;  ///< All blocks at once; null where there is none.
    std::unique_ptr<ops::LaunchGraph> graph;
    int64_t passes = 0;  ///< Without a graph.
    bool is_new = true;  ///< Whether there is such a pass was not asked.
  };
  /// What a recorded launch depends on besides its inputs.
  using Key = std::tuple<const void*, const void*, std::vector<const void*>, int64_t, bool>;

  at::Tensor compute(CausalLM& model, const Step& step, GenerationCache& cache);

  std::optional<bool> on_device_;  ///< Whether attention reads lengths there.
  std::shared_ptr<DecodeAdapters> adapters_;
  std::map<int64_t, Step> steps_;
  Key key_;
};

}  // namespace qlorapp
