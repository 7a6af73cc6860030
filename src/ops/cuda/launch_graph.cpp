// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/launch_graph.hpp"

#include <exception>
#include <map>
#include <mutex>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace qlorapp::ops {
namespace {

/// One stream and one pool of memory a device: graphs take turns, and a stream's library handles are made once.
struct Place {
  c10::cuda::CUDAStream stream;
  at::cuda::MempoolId_t pool;
};

Place place_of(at::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, Place> places;
  const std::lock_guard lock(mutex);
  const auto found = places.find(device.index());
  if (found != places.end()) return found->second;
  const Place made{c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()), at::cuda::graph_pool_handle()};
  return places.emplace(device.index(), made).first->second;
}

class Graph final : public LaunchGraph {
 public:
  void replay() override { graph.replay(); }
  at::cuda::CUDAGraph graph;
};

std::unique_ptr<LaunchGraph> record(at::Device device, const std::function<void()>& work, std::string* why) {
  const c10::cuda::CUDAGuard guard(device);
  const Place place = place_of(device);
  const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
  auto graph = std::make_unique<Graph>();
  at::cuda::CUDAEvent done;
  {
    const c10::cuda::CUDAStreamGuard side(place.stream);
    at::cuda::CUDAEvent begun;
    begun.record(before);
    begun.block(place.stream);
    try {
      work();
    } catch (...) {
      place.stream.synchronize();  // whoever cleans up does so behind what was launched
      throw;
    }
    done.record(place.stream);
    place.stream.synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();  // the stream's own, which no other could use
    try {
      // Other threads of the process, a notebook's for example, may call what this one must not while it records.
      graph->graph.capture_begin(place.pool, cudaStreamCaptureModeThreadLocal);
      work();
      graph->graph.capture_end();
    } catch (const std::exception& error) {
      if (why != nullptr) *why = error.what();
      try {
        graph->graph.capture_end();  // the stream goes back to work
      } catch (const std::exception&) {
        static_cast<void>(cudaGetLastError());  // it had ended by itself
      }
      graph.reset();
    }
  }
  done.block(before);
  return graph;
}

[[maybe_unused]] const bool told = (detail::set_recorder(record), true);

}  // namespace
}  // namespace qlorapp::ops
