// SPDX-License-Identifier: Apache-2.0
/// AdamW over a flat arena of parameters: float32 moments, or both moments in eight bits.
///
///     p ← p · (1 − lr·λ)                      decoupled weight decay
///     m ← β₁ m + (1 − β₁) g                   v ← β₂ v + (1 − β₂) g²
///     p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
///
/// Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2; Dettmers et al. 2022, arXiv:2110.02861 (block-wise
/// eight-bit states).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "format/dynamic_map.hpp"

namespace qlorapp::ops {

/// What a step must know of the gradients, found without asking the device for anything.
///
///     g' = round(gradient · inverse_scale)        norm = ‖g'‖₂         found_inf = 1 if an element of g' is not finite, else 0
///     multiplier = inverse_scale · min(1, max_norm / (norm + 1e-6))        inverse_scale if max_norm is 0
///
/// The gradient is not changed: give multiplier, and found_inf as `skip`, to the step. norm is the grad_norm of logs. It is
/// one norm over the whole, added up in double across blocks; clip_grad_norm_ forms the norm of norms: the last bits differ.
/// @param gradient  float32, contiguous, any number of elements.  @param max_norm  >= 0.
/// @param inverse_scale  1 / S of the loss scale, float32 () on the gradient's device; 1 if absent.
/// @returns (norm, found_inf, multiplier), float32 () each on the gradient's device. Does not synchronize. Deterministic.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor, at::Tensor> gradient_norm(const at::Tensor& gradient,
                                                                           const std::optional<at::Tensor>& inverse_scale,
                                                                           double max_norm);

/// One step in place. The order of roundings is that of torch.optim.AdamW(foreach=False, fused=False), bit for bit on the CPU.
/// @param parameter, gradient, exp_avg, exp_avg_sq  float32, contiguous, n elements each, one device.
/// @param step  t, counted from 1.  @param lr, eps, weight_decay  finite, >= 0.  @param beta1, beta2  in [0, 1).
/// @param multiplier, skip  float32 () on the device of parameter, or absent. The gradient becomes round(gradient · multiplier)
///        first, as it is read; unless skip is 0, nothing changes. What gradient_norm returned: no number passes through the host.
/// Does not synchronize. On a GPU the roundings are those of a CPU that has FMA, but for the square root (cuda/adamw.hpp). A
/// gradient that is not finite goes through, as it does in torch: GradScaler or a check of the norm stands before this.
/// @throws ValueError naming the argument that breaks a rule above.
void adamw_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step, double lr,
            double beta1, double beta2, double eps, double weight_decay, const std::optional<at::Tensor>& multiplier = std::nullopt,
            const std::optional<at::Tensor>& skip = std::nullopt);

/// Elements that share one absmax. Blocks count from the first element of the tensor given; the last may be short. A call
/// per parameter (or parameters padded to a multiple) keeps blocks from crossing parameters.
inline constexpr int64_t kAdamW8bitBlock = 256;

/// bitsandbytes keeps the moments of parameters with fewer elements than this in float32. The trainer does not: with r = 8 on a
/// small model nothing would be in eight bits.
inline constexpr int64_t kAdamW8bitMinSize = 4096;

/// What the bytes of a fresh state must be: codes of 0.0, with absmax 0.
inline constexpr uint8_t kAdamW8bitZeroState1 = kSignedZeroCode;
inline constexpr uint8_t kAdamW8bitZeroState2 = 0;

/// @returns the number of absmax entries for n elements.
[[nodiscard]] constexpr int64_t adamw_8bit_blocks(int64_t n) { return (n + kAdamW8bitBlock - 1) / kAdamW8bitBlock; }

/// Fresh moments of a flat arena: exp_avg and exp_avg_sq in float32, or the codes of both in eight bits and their scales.
[[nodiscard]] std::vector<at::Tensor> adamw_moments(const at::Tensor& values, bool eight_bit);

/// Elements of the arena whose moments visit the device together while they live in host memory. A multiple of the block.
inline constexpr int64_t kPagedMomentsChunk = int64_t{1} << 22;

/// One step in place with eight-bit moments:
///     m = signed_map[state1] · absmax1, v = unsigned_map[state2] · absmax2   (format/dynamic_map.hpp; per block)
/// are read, updated in float32, used for the step, and stored again: absmax = max|m|, max v of the block, and the code whose
/// entry is nearest to m / absmax, decided in double precision, the lower code on a tie. A block of zeros stores absmax 0 and
/// the codes of 0.0; so a coordinate whose gradient is always zero never moves.
/// Roundings: m = fma(1 − β₁, g, β₁·m) and v = fma((1 − β₂)·g, g, β₂·v), as torch's add_ and addcmul_ round on a CPU with FMA; the rest
/// is not fused. So m, v and absmax equal those of bitsandbytes' CPU optimizer bit for bit. Codes differ where bitsandbytes' are not
/// nearest. Each element that lies within an ulp of a midpoint gets another code from another order of roundings (4 codes in 10⁶ differ
/// from a step in double precision), and its parameter moves apart from then on.
/// @param parameter, gradient  float32, contiguous, n elements.
/// @param state1, state2  uint8, contiguous, n elements: codes of m and v.
/// @param absmax1, absmax2  float32, contiguous, adamw_8bit_blocks(n) elements.
/// @param step, lr, beta1, beta2, eps, weight_decay  as for adamw_, and eps > 0: a stored v may round to 0.
/// @param multiplier, skip  as for adamw_.
/// On a GPU nothing can be refused without synchronizing: a block of 256 with such a gradient or absmax is left as it was; skip
/// and found_inf are there to notice. Everything else is bit-equal to the CPU.
/// @throws ValueError on the CPU, before anything is changed, if an element of the gradient is not finite or so large that its square
///         may not be (from 2^63 = 9.2e18): it would poison or erase the moments of its block. The message has its flat index.
///         Also if an absmax is negative or not finite.
void adamw_8bit_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                 at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                 const std::optional<at::Tensor>& multiplier = std::nullopt, const std::optional<at::Tensor>& skip = std::nullopt);

}  // namespace qlorapp::ops
