// SPDX-License-Identifier: Apache-2.0
#include "ops/launch_graph.hpp"

#include <atomic>

#include "core/check.hpp"

namespace qlorapp::ops {
namespace {

constinit std::atomic<detail::Recorder> recorder_of_gpu{nullptr};  // set by another file's static initializer

}  // namespace

bool has_launch_graphs(at::Device device) { return device.is_cuda() && recorder_of_gpu.load() != nullptr; }

std::unique_ptr<LaunchGraph> record_launches(at::Device device, const std::function<void()>& work, std::string* why) {
  QLORAPP_CHECK_VALUE(has_launch_graphs(device), "[launch_graph] there are none on {}. Ask has_launch_graphs first.", device.str());
  return recorder_of_gpu.load()(device, work, why);
}

namespace detail {

void set_recorder(Recorder recorder) { recorder_of_gpu = recorder; }

}  // namespace detail
}  // namespace qlorapp::ops
