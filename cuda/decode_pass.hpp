// SPDX-License-Identifier: Apache-2.0
/// A pass of one token in each of up to 8 rows through all blocks of a model, in one launch: four-bit weights, adapters, a cache of keys.
///
/// The pass is a list of phases in device memory, each of which all CTAs compute together. Weights are read ahead of them, across phases.
/// wide_pass.hpp takes the same phases for more rows, without squares: next_x is normed there, by eps.
#pragma once

#include <cstdint>

#include "gated_activation.hpp"
#include "norm.hpp"
#include "qlorapp/format/nf4.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

enum class PassKind : int {
  /// round(x·Wᵀ + scaling·u·Bᵀ + bias) of layers that share an input. Then act(gate)·up, or the sum with the stream, where asked for.
  kProduct,
  kAttention,  ///< Heads of a qkv product, normed and turned, over the cache, which takes their keys and values.
  kSum,        ///< stream += factor · norm(x), or the stream as it is.
};

struct PassWeight {
  const uint8_t* packed = nullptr;  ///< (n, k) flattened; aligned to 16 bytes.
  const void* absmax = nullptr;     ///< As in GroupWeight.
  const float* nested_absmax = nullptr;
  const float* nested_offset = nullptr;
  const void* b = nullptr;  ///< (n, rank) contiguous bf16; null: no adapter.
  int n = 0, rank = 0, u_column = 0;
  float scaling = 1;
};

/// Matrices have m rows. Elements are bf16 unless the comment names another type.
struct alignas(16) PassPhase {
  static constexpr int kMostWeights = 4, kSquaresEach = 8;

  PassWeight weights[kMostWeights];  // NOLINT: of kernels, too
  /// (m, k), contiguous, 16-byte aligned. kAttention: qkv (m, Σ heads·d). kSum: (m, k), null: nothing is added.
  const void* x = nullptr;
  void* y = nullptr;       ///< (m, Σ n); of gated layers (m, n). kAttention: (m, heads·d). Null where it is added to the stream.
  void* stream = nullptr;  ///< (m, width), takes stream + factor · result; null: y takes the result.
  const void* norm = nullptr;       ///< kSum: (k) weight of a norm of x, whose squares are `squares`; null: none.
  const void* next_norm = nullptr;  ///< (width): of a norm of what this phase writes; null: none.
  void* next_x = nullptr;  ///< (m, width): what this phase writes times the weight of that norm. Its rstd follows by next_squares.
  /// (width / 16, 8): sums of squares of 16 columns of each row of what this phase writes; null: not wanted.
  float* next_squares = nullptr;
  const float* squares = nullptr;              ///< As next_squares, of what x was before the weight of its norm; null: x is whole.
  const void* a = nullptr;                     ///< (ranks, k) contiguous, 16-byte aligned.
  const void* bias = nullptr;                  ///< (Σ n); null: none.
  void *keys = nullptr, *values = nullptr;     ///< kAttention: (slots, kv_heads, d), contiguous.
  const float *cos = nullptr, *sin = nullptr;  ///< kAttention: (positions, half).
  const void *q_norm = nullptr, *k_norm = nullptr;  ///< kAttention: (d), both or neither.

  PassKind kind = PassKind::kSum;
  int count = 0;                    ///< Of weights.
  int k = 0, width = 0;             ///< Columns of x, and of what is written.
  int ranks = 0;                    ///< Σ rank.
  int rows_of_a_job = 1, jobs = 0;  ///< u is formed a column of so many rows at a time, by a CTA.
  int formed = 0;                   ///< Jobs of this phase and of all before.
  int splits = 1;                   ///< kAttention: of a row's keys, at most.
  /// 1 or 2: strips of 16 rows of W that a warp multiplies with what it has read of x. 2: each n is a multiple of 32.
  int share = 1;
  int groups = 0;                                                            ///< Of `share` strips.
  int first_strip[kMostWeights + 1] = {}, first_row[kMostWeights + 1] = {};  // NOLINT
  int next_product = 0;  ///< The next phase that is one; the number of phases where there is none.
  bool gated = false;  ///< weights[0] and [1] are gate and up; a strip is 8 rows of each. n is a multiple of 8, with share 2 of 16.
  bool wide_ranks = false;  ///< Rows of u and B are whole 16 bytes.
  bool turns_before_norm = false, interleaved = false;
  Activation activation = Activation::kSilu;
  int half = 0;                 ///< Pairs of a head that turn.
  int window = 0;               ///< As DecodeAttention::window.
  float eps = 0;                ///< Of the norm that `squares` belongs to; kAttention: of heads.
  float factor = 1, scale = 1;  ///< Of what is added to the stream; of scores, times log2(e).
};
static_assert(sizeof(PassPhase) % 16 == 0);

struct DecodePass {
  const PassPhase* phases = nullptr;  ///< On the device.
  int count = 0, m = 0;               ///< Phases; rows, 1 to 8.
  int heads = 0, kv_heads = 0, head_dim = 0;
  const int64_t *positions = nullptr, *slots = nullptr, *starts = nullptr, *lengths = nullptr, *shared_starts = nullptr,
                *shared_lengths = nullptr;  ///< (m) each, as in DecodeSteps::Step.
  void* u = nullptr;                        ///< (m, the most Σ rank of a phase).
  float* partial = nullptr;                 ///< pass_partial_floats() of them.
  unsigned* counters = nullptr;             ///< pass_counters() of them, 0 before and after.
  int64_t nested_block_size = 256;
  int nested_shift = 8;                        ///< Its logarithm; -1: it is no power of two.
  NormRule norm_rule = NormRule::kRoundTwice;  ///< kOnePlus: of the norms of heads, x and the next x.
  QuantType quant_type = QuantType::kNf4;
  bool nested = false;
};

/// Whether there is a kernel: sm_90, bf16, m up to 8, head_dim of 8, 16 … 256; and as many CTAs as the device has multiprocessors run at a time.
[[nodiscard]] bool has_decode_pass(Float type, int64_t m, int64_t head_dim, int architecture, int multiprocessors);
/// Fills rows_of_a_job, jobs, share, groups, first_strip and first_row of a product; kind, weights, ranks, k and gated are there.
/// @returns false where its shape has no kernel.
[[nodiscard]] bool divide_product(PassPhase& phase, int m, int multiprocessors);
[[nodiscard]] int attention_splits(int m, int heads, int kv_heads, int multiprocessors);
[[nodiscard]] int64_t pass_partial_floats(const DecodePass& pass, int multiprocessors);
[[nodiscard]] int64_t pass_counters(const DecodePass& pass);
/// Asynchronous; allocates nothing. Two at a time on one device wait for each other, they do not stop each other.
[[nodiscard]] cudaError_t decode_pass(const DecodePass& pass, int multiprocessors, Stream stream);

}  // namespace qlorapp::cuda
