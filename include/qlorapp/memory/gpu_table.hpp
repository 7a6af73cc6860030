// SPDX-License-Identifier: Apache-2.0
/// The GPUs that a plan knows, in one table. Memory is the least that CUDA was seen to report as the card's total (cudaMemGetInfo, in
/// torch's errors "total capacity"), some hundred MiB less than nvidia-smi lists; gpu_table.cpp names the sources. A plan subtracts
/// the CUDA context from that. Bandwidth, tensor rate (dense, 16-bit inputs, float32 sums), float32 rate and multiprocessors are the
/// makers' published figures.
///
/// Rates that a training step sustains are lower. `sustained` says which part of the published tensor rate, and where that
/// comes from:
///     measured      docs/performance.md and the ceilings behind it, on this card
///     reported      a published measurement by others: a T4's cuBLAS settles at about 24 TFLOP/s under its 70 W
///                   (forums.developer.nvidia.com/t/264462); on an A10, of 150 W, whole training steps ran at 43 % of 125 TFLOP/s,
///                   that is 54 (modula-systems/modula#1, review), so that its products are taken to sustain 60
///     extrapolated  the part that the measured card sustains, which is limited by power as these are
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "qlorapp/core/units.hpp"
#include "qlorapp/ops/planned_device.hpp"

namespace qlorapp {

enum class Evidence : uint8_t { kMeasured, kReported, kExtrapolated };
/// As a plan says it: "measured on this card", "from reported rates", "extrapolated".
[[nodiscard]] std::string_view to_string(Evidence evidence);
/// Half the width of what an estimate of time may be off by, as a part of it.
[[nodiscard]] double uncertainty(Evidence evidence);

struct Gpu {
  std::string_view name;
  Bytes memory;
  int64_t architecture = 0;  ///< 75, 80 …
  double bandwidth = 0;      ///< Bytes a second.
  double tensor_rate = 0;    ///< Operations a second.
  double sustained = 0;      ///< Part of tensor_rate.
  Evidence evidence = Evidence::kExtrapolated;
  int64_t multiprocessors = 0;
  double float32_rate = 0;  ///< Operations a second without tensor cores, which is how torch multiplies float32; 0: not known.

  /// The figures that a plan uses.
  [[nodiscard]] ops::PlannedDevice device() const;
  /// What the CUDA context, driver and library code take on it, which torch does not count; it depends on the driver, too. Measured on
  /// an H200 (docs/plan-accuracy.md: 0.51 GiB at first, 0.78 with all libraries loaded), an allowance for all others.
  [[nodiscard]] Bytes context() const;
  [[nodiscard]] bool has_bf16() const { return architecture >= 80; }
  /// Bytes per second of copies from pinned host memory, by the PCIe generation of its architecture, in 16 lanes.
  [[nodiscard]] double host_rate() const;
  /// Bytes per second that a GPU receives from others of its machine. NVLink of sm_90: as measured on two H100 (benchmarks/ranks_cuda.py:
  /// 188 to 210 GB/s for a block of 8B, 245 for one of 70B). Others: host_rate(), as if there were PCIe alone.
  [[nodiscard]] double peer_rate() const;
};

/// @param text  a name of the table in any case ("t4", "A100-80GB"), or an amount of memory ("16GiB", "24GB") of a card that is
/// not in
///              it; that has the given rates and architecture, or none, and then no time is estimated.
/// @throws ValueError naming the cards there are.
[[nodiscard]] Gpu find_gpu(std::string_view text, int64_t architecture = 0, double bandwidth = 0, double tensor_rate = 0);

/// A device that is there, for what decides between ways to do the same work on it.
/// @param name  as the driver has it; the card of the table all of whose words are in it ("NVIDIA A100-SXM4-80GB"), or another of
///              its architecture with `memory` in its place; empty: a CPU, whose rates are a guess of two cores'.
[[nodiscard]] Gpu rates_of(std::string_view name, int64_t architecture, Bytes memory);

/// "14GiB", "14.5 GB", "800MiB", "123456": G and GiB are 2^30, GB is 10^9.
/// @throws ValueError naming `what` for anything else, for a negative amount, and for one above 2^62.
[[nodiscard]] Bytes parse_bytes(std::string_view what, std::string_view text);

}  // namespace qlorapp
