// SPDX-License-Identifier: Apache-2.0
#include "ops/launch_graph.hpp"

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
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

/// Ends a recording that failed. torch ends the stream's capture first and its own bookkeeping after that (both allocators' pools and
/// the generators' state), which a failure of the first skips: they would go on as if the stream were recorded, and no other graph
/// could begin. So an invalid capture is exchanged for one that is valid and does next to nothing, which torch then ends as any other.
/// A graph that cannot be ended even so is never destroyed: the allocator holds a rule that lies in it.
/// @param touched  a byte of device memory from before the recording.
void give_up(std::unique_ptr<Graph> graph, c10::cuda::CUDAStream stream, const at::Tensor& touched) {
  try {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    static_cast<void>(cudaStreamIsCapturing(stream, &status));
    if (status != cudaStreamCaptureStatusActive) {
      cudaGraph_t nothing = nullptr;
      if (status == cudaStreamCaptureStatusInvalidated) static_cast<void>(cudaStreamEndCapture(stream, &nothing));
      static_cast<void>(cudaGetLastError());  // the failure that is known already
      C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      C10_CUDA_CHECK(cudaMemsetAsync(touched.data_ptr(), 0, 1, stream));
    }
    graph->graph.capture_end();
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());
    static_cast<void>(graph.release());  // NOLINT: see above
  }
}

std::unique_ptr<LaunchGraph> record(at::Device device, const std::function<void()>& work, std::string* why) {
  const c10::cuda::CUDAGuard guard(device);
  auto [stream, graph] = place_of(device);
  const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
  const at::Tensor touched = at::empty({1}, at::TensorOptions().dtype(at::kByte).device(device));
  at::cuda::CUDAEvent done;
  {
    const c10::cuda::CUDAStreamGuard side(stream);
    at::cuda::CUDAEvent begun;
    begun.record(before);
    begun.block(stream);
    try {
      work();
    } catch (...) {
      stream.synchronize();  // so that cleaning up comes after the launches
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
      give_up(std::move(graph), stream, touched);
    }
  }
  done.block(before);
  return std::move(graph);
}

[[maybe_unused]] const bool recorder_registered = (detail::set_recorder(record), true);

}  // namespace
}  // namespace qlorapp::ops
