// SPDX-License-Identifier: Apache-2.0
/// Launches of a GPU that are recorded once and replayed as one: a CUDA graph, behind an interface that any build has.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/core/Device.h>

namespace qlorapp::ops {

/// Replays read and write the memory of the tensors that the recorded work read and wrote; its temporaries have memory of their own,
/// which all graphs of a device share, so that one replay's results are gone with the next one's begin.
class LaunchGraph {
 public:
  virtual ~LaunchGraph() = default;
  /// On the current stream; does not synchronize.
  virtual void replay() = 0;
};

/// Whether this build and device have such graphs.
[[nodiscard]] bool has_launch_graphs(at::Device device);

/// Runs `work` twice on a stream of its own: first for its results, which the current stream sees afterwards, then to record it,
/// without any effect. Synchronizes, and returns the memory that the first run left in the allocator.
/// @param work  launches alone. Nothing may wait for the device; a replay does not repeat work on the host.
/// @returns null if the recording failed, with the reason in `why`; the results of the first run are there all the same.
[[nodiscard]] std::unique_ptr<LaunchGraph> record_launches(at::Device device, const std::function<void()>& work, std::string* why);

namespace detail {

/// Registered by the code for GPUs when the library is loaded.
using Recorder = std::unique_ptr<LaunchGraph> (*)(at::Device device, const std::function<void()>& work, std::string* why);
void set_recorder(Recorder recorder);

}  // namespace detail
}  // namespace qlorapp::ops
