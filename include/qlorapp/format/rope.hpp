// SPDX-License-Identifier: Apache-2.0
/// Rotary position embeddings: the rule of config.json by which pairs of a head's elements turn. Torch-free.
///
/// Source: transformers 5.23 `modeling_rope_utils`, and the rotary class of each family.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace qlorapp::format {

struct RopeSettings {
  /// kNone: positions do not turn anything (NoPE).
  enum class Type : uint8_t { kDefault, kLinear, kDynamic, kLlama3, kYarn, kLongRope, kNone };
  Type type = Type::kDefault;
  double theta = 10000.0;
  int64_t width = 0;  ///< The first so many elements of a head turn, the others stay; even.
  /// kLinear, kLlama3, kYarn: positions are divided by it, all or in part. kDynamic: by as much as a row is longer than `original`.
  double factor = 1.0;
  /// kLlama3: waves longer than original / low_freq_factor are slowed by `factor`, shorter than original / high_freq_factor are kept, those
  /// between are blended.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  /// kYarn: pairs that turn more often than beta_fast times over `original` positions are kept, less often than beta_slow slowed, those
  /// between are blended; `truncate`: from whole pair to whole pair.
  double beta_fast = 32.0, beta_slow = 1.0;
  bool truncate = true;
  /// kLongRope: divisors of the frequencies, width / 2 each, for rows up to `original` positions and for batches with a longer one.
  std::vector<double> short_factor, long_factor;
  int64_t original_max_position_embeddings = 0;  ///< kDynamic, kLlama3, kYarn, kLongRope.
  double attention_factor = 1.0;                 ///< Of cosines and sines; scores carry its square.
  /// Queries are multiplied by 1 + query_beta · ln(1 + ⌊position / original⌋) (Ministral 3).
  double query_beta = 0.0;

  friend bool operator==(const RopeSettings&, const RopeSettings&) = default;
};

[[nodiscard]] std::string to_string(RopeSettings::Type type);

/// The angle by which each pair of turning elements turns from one position to the next: width / 2 values,
///     default    f_i = theta^(-2i / width)
///     linear     f_i / factor
///     dynamic    theta · (factor · length / original - factor + 1)^(width / (width - 2)) in place of theta, from length > original on
///     llama3     λ_i = 2π / f_i;  f_i, f_i / factor, or between them (see RopeSettings)
///     yarn       the same with the bounds counted in pairs
///     longrope   f_i / short_factor_i, or f_i / long_factor_i from length > original on
/// computed in float32 in the order of transformers' operations. theta^x is rounded from double here; torch's vectorized power
/// is off by up to one ulp. So most values are transformers' bits, the others within 2 ulp, and within 2 * factor ulp between
/// the two wavelengths of llama3, where the blend subtracts nearly equal numbers.
/// @param length  of the longest row of a batch. dynamic takes it anew in each batch, so a row's angles depend on no earlier batch.
[[nodiscard]] std::vector<float> rope_inverse_frequencies(const RopeSettings& rope, int64_t length = 0);

/// Whether the frequencies are others in batches of this length than in short ones.
[[nodiscard]] bool is_long_for(const RopeSettings& rope, int64_t length);

}  // namespace qlorapp::format
