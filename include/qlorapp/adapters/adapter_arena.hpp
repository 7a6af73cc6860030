// SPDX-License-Identifier: Apache-2.0
/// One buffer each for all adapter values and all their gradients, with named views.
///
/// A flat arena lets the optimizer, the norm and the overflow check be a few passes over contiguous memory, and lets a
/// hand-written backward add a gradient where the optimizer reads it. Every view begins at a multiple of 256 elements, so that
/// the blocks of an 8-bit optimizer never cross parameters; the elements between two views are zero and stay zero.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace qlorapp {

class AdapterArena {
 public:
  static constexpr int64_t kAlignment = 256;  ///< Elements.

  struct Entry {
    std::string name;  ///< PEFT's, without the adapter's name: "base_model.model.….q_proj.lora_A.weight".
    std::vector<int64_t> shape;
    int64_t offset = 0;  ///< Elements from the start of the arena.
    int64_t numel = 0;
  };

  AdapterArena() = default;
  /// @param names_and_shapes  in the order of the parameters, each name once, sizes >= 0 (else ValueError). All begins at zero.
  /// @param layout  the parameters' places in memory, as a permutation of their indices: those that a product can write together stand
  ///                together. Empty: in their order.
  AdapterArena(std::vector<std::pair<std::string, std::vector<int64_t>>> names_and_shapes, at::Device device,
               std::vector<size_t> layout = {});

  [[nodiscard]] const std::vector<Entry>& entries() const { return entries_; }
  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  /// Trainable elements, without the gaps between views.
  [[nodiscard]] int64_t numel() const;
  /// @throws ValueError with the nearest name, if there is none such.
  [[nodiscard]] int64_t index_of(std::string_view name) const;

  /// Flat float32 buffers, gaps included.
  [[nodiscard]] const at::Tensor& values() const { return values_; }
  [[nodiscard]] const at::Tensor& gradients() const { return gradients_; }

  /// Leaf (requires_grad) that shares the arena's memory; its grad() is the arena's slice.
  [[nodiscard]] const at::Tensor& parameter(int64_t i) const { return parameters_[static_cast<size_t>(i)]; }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const { return parameters_; }
  [[nodiscard]] const at::Tensor& gradient(int64_t i) const { return gradient_views_[static_cast<size_t>(i)]; }

  /// Zeroes the gradients and binds again every grad() that a user's loop has set to None.
  void zero_grad();
  /// Binds again every undefined grad() to its slice, zeroed first; a grad() that is another tensor is added into the slice.
  void bind_gradients();
  /// Takes in the values of every parameter whose memory was replaced (`p.data = …`), and gives it its slice again.
  /// @throws ValueError if its shape, dtype or device changed, too.
  void bind_values();
  /// Makes `parameter` (same shape, dtype, device and memory) the leaf of entry i: a binding's own tensor object. Its gradient moves in.
  void adopt_parameter(int64_t i, const at::Tensor& parameter);

 private:
  std::vector<Entry> entries_;
  std::vector<at::Tensor> parameters_;
  at::Tensor values_, gradients_;
  std::vector<at::Tensor> gradient_views_;  ///< Made once: a step asks for hundreds.
};

}  // namespace qlorapp
