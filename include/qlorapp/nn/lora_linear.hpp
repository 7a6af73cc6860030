// SPDX-License-Identifier: Apache-2.0
/// A linear layer with a frozen base and a trainable low-rank update, for use in any LibTorch loop.
///
///     y = x·Wᵀ (+ bias) + s·(drop(x)·Aᵀ)·Bᵀ        s = alpha / r, or alpha / sqrt(r) with use_rslora
///
/// With use_dora the sum of base and update is scaled row by row to a trained magnitude (src/adapters/dora.hpp).
///
/// W stays packed: autograd saves the four-bit weight, never a dense one, and its backward forms dx = dy·W panel by panel.
/// A (r, in) is drawn uniformly from ±1/sqrt(in) (kaiming_uniform with a = sqrt(5)) and B (out, r) begins at zero, as in PEFT,
/// so that the layer begins as its base. Both are float32.
///
/// A plain value. It has no training mode; the caller passes `training`. In a torch::nn::Module use LoraLinearModule
/// (nn/lora_linear_module.hpp), which train(), eval() and to() reach.
///
/// Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732 (rsLoRA); init of PEFT's tuners/lora/layer.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/lora_adapter.hpp"

namespace qlorapp {

class LoraLinear {
 public:
  struct Options {
    int64_t r = 8;            ///< >= 1.
    double lora_alpha = 8;    ///< Finite, > 0.
    double lora_dropout = 0;  ///< In [0, 1).
    bool use_rslora = false;
    bool gaussian_init = false;  ///< A normal with standard deviation 1/r instead of uniform.
    bool use_dora = false;       ///< Trains a magnitude for each output, too. Synchronizes when the layer is made.
  };

  /// Where merge() writes the sum of base and update.
  enum class MergeInto {
    kDense,    ///< A dense weight in the dtype of the base: one rounding, and memory for it.
    kFourBit,  ///< Four bits again: small, but quantized a second time. A dense base has no four bits: it is refused.
  };

  /// @param base  (out, in), four-bit or dense, frozen.
  /// @param bias  (out) or undefined; floating, on the base's device; frozen.
  /// @param seed  of the initial values of A.
  /// @throws ValueError naming the option, if one is outside its range; or base or bias, if they are no such weight.
  LoraLinear(FrozenWeight base, const Options& options, uint64_t seed, at::Tensor bias = {});

  /// @param x  (…, in), floating, on the base's device; float64 is computed in float64. A dense base requires its own dtype.
  /// @param training  Whether dropout is on. Its key is drawn from torch's CPU generator, so manual_seed governs it and a
  ///        CheckpointedBlock forms the same mask again.
  /// @returns (…, out) in the dtype of x. Does not synchronize.  @throws ValueError if x is not as above.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, bool training) const;
  /// The same for a layer without dropout, whose training and evaluation are one function.
  /// @throws ValueError with lora_dropout > 0.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;

  /// Leaves that require grad.
  [[nodiscard]] const at::Tensor& a() const { return adapter_.a; }
  [[nodiscard]] const at::Tensor& b() const { return adapter_.b; }
  /// (out) float32 with use_dora, else undefined.
  [[nodiscard]] const at::Tensor& magnitude() const { return adapter_.magnitude; }
  /// A, B and the magnitude if there is one.
  [[nodiscard]] std::vector<at::Tensor> parameters() const;
  /// PEFT's names behind a prefix: "up.lora_A.weight", "up.lora_B.weight", "up.lora_magnitude_vector"; without one "lora_A.weight", ….
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> named_parameters(const std::string& prefix = "") const;
  /// Makes these (same shapes, dtype and device as a(), b() and magnitude()) the leaves: a binding's own tensor objects.
  /// @throws ValueError if they differ in kind.
  void adopt_parameters(const at::Tensor& a, const at::Tensor& b, const at::Tensor& magnitude = {});
  [[nodiscard]] const LoraAdapter& adapter() const { return adapter_; }
  [[nodiscard]] double scaling() const { return adapter_.scaling; }
  [[nodiscard]] const FrozenWeight& base() const { return base_; }

  [[nodiscard]] const at::Tensor& bias() const { return bias_; }
  [[nodiscard]] double dropout() const { return adapter_.dropout; }

  /// Moves base, bias and parameters (with their gradients) in place: every copy of this layer moves, and a() and b() stay the leaves.
  /// @throws ValueError if A and B are parts of an arena: move the layer before adopt_parameters.
  void to(at::Device device);
  /// Converts a dense base and the bias in place. Four-bit codes have no dtype, and A and B stay float32.
  /// @throws ValueError unless dtype is floating.
  void to(at::ScalarType dtype);

  /// Adds the update into the weight; forward then uses the sum alone. The base is kept aside untouched.
  /// @throws ValueError if the layer is merged already, the sum is not finite, or kFourBit is asked of a dense base. Nothing is changed then.
  void merge(MergeInto into = MergeInto::kDense);
  /// Restores the exact codes and scales of the base. @throws ValueError if the layer is not merged.
  void unmerge();
  [[nodiscard]] bool merged() const { return merged_.has_value(); }

 private:
  FrozenWeight base_;
  std::optional<FrozenWeight> merged_;
  at::Tensor bias_;
  LoraAdapter adapter_;
};

}  // namespace qlorapp
