// SPDX-License-Identifier: Apache-2.0
/// Inputs of blocks that wait for their backward pass in pinned host memory (Keep::kInputOnHost).
///
///     forward of block i       x_i → host, as soon as x_i is there, beside the block's own work
///     backward of block i + 1  host → x_i, once the widest tensors of that block are freed
///
/// At most two inputs are on the device then, and one where a block is widest.
///
/// All copies run on one stream of their own, in order, so a slot of host memory can be used again as soon as its last copy is
/// issued. The device's caching allocator never reuses memory under a copy: a device tensor that a copy reads or
/// writes belongs to the stream of the computation, the copy begins after the work in that stream when it is issued, and that
/// stream waits for the copy before the tensor is freed. So memory is used again in the order of the stream, and the peak does
/// not depend on how far the host runs ahead, as it would with Tensor.record_stream. No call here waits on the host, but for
/// the allocation of pinned memory, which the first step does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "qlorapp/core/units.hpp"

namespace qlorapp {

/// Pinned host memory that a model uses step after step, and the stream of its copies. Held by a shared_ptr. Thread-safe.
class PinnedRing : public std::enable_shared_from_this<PinnedRing> {
 public:
  /// @param device  of the tensors to be copied; not a CPU.
  explicit PinnedRing(at::Device device);

  [[nodiscard]] at::Device device() const { return device_; }
  /// Pinned memory held, in use or not. Slots are powers of two, so that batches of other lengths find one.
  [[nodiscard]] Bytes nbytes() const;
  /// How often it had to allocate: no more than the first step, while batches do not grow.
  [[nodiscard]] int64_t allocations() const;

 private:
  friend class InputOffload;

  /// An uninitialized contiguous host tensor; its slot is free again when the last reference goes.
  [[nodiscard]] at::Tensor acquire(at::IntArrayRef sizes, at::ScalarType dtype);
  void release(at::Tensor slot);
  /// to ← from on the copy stream, after what `stream` has to do now.
  void copy(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream);
  /// `stream` goes on when the copies issued so far are done.
  void join(const c10::Stream& stream);

  at::Device device_;
  c10::Stream copies_;
  mutable std::mutex mutex_;
  c10::Event forked_, copied_;
  std::vector<at::Tensor> free_;  ///< uint8.
  int64_t bytes_ = 0;
  int64_t allocations_ = 0;
};

/// The inputs of one micro-batch. Part of its StepContext, so that a graph of autograd keeps it as long as it needs it.
class InputOffload {
 public:
  explicit InputOffload(std::shared_ptr<PinnedRing> ring);
  ~InputOffload();
  InputOffload(const InputOffload&) = delete;
  InputOffload& operator=(const InputOffload&) = delete;

  /// A copy to the host in flight. Its end makes the current stream wait for the copy; x lives until then.
  class Copy {
   public:
    /// @param x  contiguous, on the ring's device, complete in the current stream's order.
    /// @param block  the one whose backward will need it first.
    Copy(InputOffload& offload, at::Tensor x, int64_t block);
    ~Copy();
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;
    /// What to keep instead of x.
    [[nodiscard]] const at::Tensor& host() const { return host_; }

   private:
    InputOffload& offload_;
    at::Tensor x_, host_;
    c10::Stream stream_;
  };

  /// The input that `host` stands for, on the device, for the current stream. May be called again: nothing is consumed.
  [[nodiscard]] at::Tensor load(const at::Tensor& host, int64_t block);
  /// Begins to load the input of `block` if it waits on the host; else does nothing.
  void prefetch(int64_t block);

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Loading {
    at::Tensor host, x;
    c10::Stream stream;  ///< That x belongs to.
  };
  [[nodiscard]] Loading begin_load(const at::Tensor& host);
  void drop_prefetched();

  std::shared_ptr<PinnedRing> ring_;
  std::map<int64_t, WeakTensor> waiting_;  ///< By block.
  std::optional<Loading> prefetched_;
};

}  // namespace qlorapp
