// SPDX-License-Identifier: Apache-2.0
/// A pass of one token in each of up to 128 rows through all blocks of a model on a GPU, behind an interface that any build has: of up to 8 rows in one
/// launch, of more in a few a block.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/family.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops {

struct PassLinear {
  at::Tensor packed, absmax;                ///< As linear_4bit's.
  at::Tensor nested_absmax, nested_offset;  ///< Undefined without double quantization; of one pass all or none.
  int64_t rows = 0, u_column = 0;           ///< Its rows of PassGroup::a begin with u_column.
  at::Tensor b;                             ///< (rows, r) contiguous, bfloat16; undefined: no adapter.
  double scaling = 1;
};

/// Layers that read one input, which bring their outputs one after the other.
struct PassGroup {
  std::vector<PassLinear> linears;
  int64_t columns = 0;
  at::Tensor a;     ///< (Σ r, columns) contiguous, bfloat16; undefined: no adapters.
  at::Tensor bias;  ///< (Σ rows) bfloat16; undefined: none.
};

/// Norms are (D), of heads (d), bfloat16; undefined: there is none.
struct PassBlock {
  PassGroup qkv, o, gate_up, down;
  at::Tensor before_attention, after_attention, before_mlp, after_mlp, of_queries, of_keys;
  at::Tensor cos, sin;      ///< float32 (positions, half); undefined: nothing turns.
  at::Tensor keys, values;  ///< (slots, H_kv, d) bfloat16, contiguous.
  int64_t window = 0;       ///< The last keys that a query sees; 0: all.
};

struct PassModel {
  std::vector<PassBlock> blocks;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t capacity = 1;  ///< Keys that a row has at most.
  double eps = 1e-6, attention_scale = 1, residual_factor = 1;
  format::NormRule norm_rule = format::NormRule::kRoundTwice;
  format::Activation activation = format::Activation::kSilu;
  bool interleaved = false, turns_before_norm = false;
  int64_t block_size = 64, nested_block_size = 256;
  QuantType quant_type = QuantType::kNf4;  ///< Of a code book.
};

/// For one number of rows. Holds the model's tensors; their values may change, their memory may not.
class DecodePass {
 public:
  virtual ~DecodePass() = default;
  /// @param x  (rows, D) bfloat16, the embeddings.
  /// @returns the residual stream behind the last block, (rows, D): memory of this object, until the next call. Keys and values of the tokens are
  ///          in the cache then. Does not synchronize.
  [[nodiscard]] virtual at::Tensor run(const at::Tensor& x) = 0;
};

/// @param numbers  (6, rows) int64 on the device, read by each run: position and slot of the token; of a row, as ops::attention_with_cache()
///                 takes them, cache start, length, shared start and shared length, with the token's own.
/// @returns null where this GPU, or this build, has no such launch for that model.
[[nodiscard]] std::unique_ptr<DecodePass> make_decode_pass(const PassModel& model, const at::Tensor& numbers);

namespace detail {

/// Registered by the code for GPUs when the library is loaded.
using PassMaker = std::unique_ptr<DecodePass> (*)(const PassModel& model, const at::Tensor& numbers);
void set_pass_maker(PassMaker maker);

}  // namespace detail
}  // namespace qlorapp::ops
