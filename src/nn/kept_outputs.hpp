// SPDX-License-Identifier: Apache-2.0
/// Outputs that a checkpointed block keeps for its recompute, so that the layers which made them do not run again.
///
/// The first run stores them in the order of the calls; a recompute reads them in that order.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace qlorapp {

class KeptOutputs {
 public:
  /// @returns the outputs of `compute()`, or in a recompute those of the first run. An output that was changed in place since then is
  ///          computed again. Outputs have no graph.
  template <class Compute>
  std::vector<at::Tensor> get(const Compute& compute) {
    if (storing_) {
      std::vector<at::Tensor> outputs = compute();
      store(outputs);
      return outputs;
    }
    std::vector<at::Tensor> outputs = take();
    return outputs.empty() ? compute() : outputs;
  }

  /// From now on, get() reads from the beginning.
  void rewind() {
    storing_ = false;
    next_ = 0;
  }

 private:
  struct Output {
    at::Tensor tensor;  ///< Shares memory and version with the output itself. May be undefined.
    int64_t version = 0;
  };
  void store(const std::vector<at::Tensor>& outputs);
  std::vector<at::Tensor> take();  ///< Of the next call; empty if there is none, or if one of them was changed.

  std::vector<std::vector<Output>> calls_;
  std::size_t next_ = 0;
  bool storing_ = true;
};

/// Those of the checkpointed block that runs on this thread, or null.
[[nodiscard]] KeptOutputs*& kept_outputs_here();

}  // namespace qlorapp
