// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/launch_graph.hpp"

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace qlorapp::ops {
namespace {

/// A device's graphs take turns on one stream, whose library handles are made once, and share one pool of memory.
struct Place {
  c10::cuda::CUDAStream stream;
  /// torch ends a pool with the last graph of it, and takes it for no other afterwards.
  std::weak_ptr<at::cuda::MempoolId_t> pool;
};

class Graph final : public LaunchGraph {
 public:
  explicit Graph(std::shared_ptr<at::cuda::MempoolId_t> pool) : pool_(std::move(pool)) {}
  void replay() override { graph.replay(); }
  [[nodiscard]] at::cuda::MempoolId_t pool() const { return *pool_; }

  at::cuda::CUDAGraph graph;

 private:
  std::shared_ptr<at::cuda::MempoolId_t> pool_;
};

/// A stream of this device, and a graph of the pool that those which live share.
std::pair<c10::cuda::CUDAStream, std::unique_ptr<Graph>> place_of(at::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, Place> places;
  const std::lock_guard lock(mutex);
  auto found = places.find(device.index());
  if (found == places.end()) {
    found = places.emplace(device.index(), Place{c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()), {}}).first;
  }
  std::shared_ptr<at::cuda::MempoolId_t> pool = found->second.pool.lock();
  if (pool == nullptr) {
    pool = std::make_shared<at::cuda::MempoolId_t>(at::cuda::graph_pool_handle());
    found->second.pool = pool;
  }
  return {found->second.stream, std::make_unique<Graph>(std::move(pool))};
}

/// After a failed capture. torch ends the stream's capture first and its own bookkeeping after that, which a failure skips: the
/// allocator would go on serving this stream from the graph's pool, by a rule that lies in the graph. So the bookkeeping is ended
/// here, and the graph is never destroyed.
void give_up(std::unique_ptr<Graph> graph, at::Device device) {
  Graph* const kept = graph.release();  // NOLINT: see above
  try {
    kept->graph.capture_end();
    return;
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());  // the failure that is known already
  }
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device.index(), kept->pool());
    c10::cuda::CUDACachingAllocator::releasePool(device.index(), kept->pool());
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());  // it had not begun
  }
}

std::unique_ptr<LaunchGraph> record(at::Device device, const std::function<void()>& work, std::string* why) {
  const c10::cuda::CUDAGuard guard(device);
  auto [stream, graph] = place_of(device);
  const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
  at::cuda::CUDAEvent done;
  {
    const c10::cuda::CUDAStreamGuard side(stream);
    at::cuda::CUDAEvent begun;
    begun.record(before);
    begun.block(stream);
    try {
      work();
    } catch (...) {
      stream.synchronize();  // whoever cleans up does so behind what was launched
      throw;
    }
    done.record(stream);
    stream.synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();  // the stream's own, which no other could use
    try {
      // Other threads of the process, a notebook's for example, may call what this one must not while it records.
      graph->graph.capture_begin(graph->pool(), cudaStreamCaptureModeThreadLocal);
      work();
      graph->graph.capture_end();
    } catch (const std::exception& error) {
      if (why != nullptr) *why = error.what();
      give_up(std::move(graph), device);
    }
  }
  done.block(before);
  return std::move(graph);
}

[[maybe_unused]] const bool told = (detail::set_recorder(record), true);

}  // namespace
}  // namespace qlorapp::ops
