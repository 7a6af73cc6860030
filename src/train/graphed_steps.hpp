// SPDX-License-Identifier: Apache-2.0
/// Micro-steps whose shape comes again, as one launch each.
///
/// A micro-step of a small model on few tokens is over before the host has launched it: on an H200, 1B with 1 × 256 tokens twice as
/// fast as it can be launched (docs/performance.md). Rows that have the same lengths again and again (packing_strategy="wrapped", data
/// that were cut to one length) let their launches be recorded and replayed. The numbers are the same bits.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/step_context.hpp"
#include "ops/launch_graph.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// What train_step calls in a model's place. Another active adapter makes it begin anew; clear() it after any other change of the
/// model's settings.
class GraphedSteps {
 public:
  /// Above this a GPU is busy for longer than the host takes, whatever the model.
  static constexpr int64_t kMostTokens = 2048;
  /// A shape is recorded when it comes for this time: single ones are not worth it.
  static constexpr int64_t kSeen = 3;
  /// Graphs at a time, and shapes that are remembered; what was not used for longest goes.
  static constexpr int64_t kMostGraphs = 8, kMostShapes = 256;
  /// Graphs that may be made in a run: with more shapes than this, recording costs more than replays gain.
  static constexpr int64_t kMostRecordings = 32;

  explicit GraphedSteps(CausalLM& model) : model_(model) {}

  /// CausalLM::forward_backward by the graph of this shape, if there is one. Takes the usual way where nothing can be recorded:
  /// dropout has new numbers each time, inputs on the host have events of their own, and trained tables count by tokens.
  /// Never calls `done`: the launches of a graph are one, and ranks exchange gradients behind the window.
  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& done);

  /// Gives the graphs' memory back.
  void clear() { shapes_.clear(); }
  /// Micro-steps that were one launch.
  [[nodiscard]] int64_t replayed() const { return replayed_; }

 private:
  /// Rows of these lengths with so many targets.
  struct Shape {
    std::vector<int64_t> row_starts;
    int64_t target_count = 0;
    int64_t seen = 0;
    bool refused = false;  ///< It could not be recorded.
    Batch batch;           ///< What the graph reads.
    at::Tensor grad_scale;
    LossSum sum;
    std::vector<Rotation> rotations;  ///< Of it, too: the model may replace its tables by longer ones.
    std::unique_ptr<ops::LaunchGraph> graph;
  };
  [[nodiscard]] bool can_record(const Batch& batch) const;
  Shape& shape_of(const Batch& batch);
  LossSum record(Shape& shape, const Batch& batch, const at::Tensor& grad_scale, StepKey key);

  CausalLM& model_;
  const void* adapters_ = nullptr;  ///< Where those lay that the graphs read.
  std::list<Shape> shapes_;         ///< The last used first.
  int64_t replayed_ = 0, recorded_ = 0;
};

}  // namespace qlorapp
