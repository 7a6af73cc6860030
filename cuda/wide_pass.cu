// SPDX-License-Identifier: Apache-2.0
#include "wide_pass.hpp"

#include <algorithm>
#include <numbers>
#include <utility>

#include "decode_attention.hpp"
#include "wide_ends.cuh"

namespace qlorapp::cuda {
namespace {

GemmFourBitGroup group_of(const DecodePass& pass, const PassPhase& phase, float* partial) {
  GemmFourBitGroup group{.x = phase.x,
                         .x_stride = phase.k,
                         .y = phase.y,
                         .y_stride = phase.width,
                         .type = Float::kBFloat16,
                         .m = pass.m,
                         .k = phase.k,
                         .weights = {},
                         .count = phase.count,
                         .a = phase.a,
                         .u = pass.u,
                         .ranks = phase.ranks,
                         .counters = nullptr,
                         .bias = phase.bias,
                         .nested_block_size = pass.nested_block_size,
                         .quant_type = pass.quant_type,
                         .partial = partial};
  for (int i = 0; i < phase.count; ++i) {
    const PassWeight& from = phase.weights[i];
    group.weights[i] = {.packed = from.packed,
                        .absmax = from.absmax,
                        .nested_absmax = from.nested_absmax,
                        .nested_offset = from.nested_offset,
                        .n = from.n,
                        .b = from.b,
                        .rank = from.rank,
                        .u_column = from.u_column,
                        .scaling = from.scaling};
  }
  return group;
}

/// @param sums  of a product without them: null, x is read.
cudaError_t launch_stream(const DecodePass& pass, const PassPhase& phase, const Sums& sums, unsigned char* next, Stream stream) {
  const InStream end{.sums = sums,
                     .x = phase.x,
                     .stream = phase.stream,
                     .norm = phase.norm,
                     .next_norm = phase.next_norm,
                     .next_x = phase.next_x,
                     .next = next,
                     .m = pass.m,
                     .width = phase.width,
                     .eps = phase.eps,
                     .factor = phase.factor,
                     .rule = pass.norm_rule};
  return with_tokens(pass.m, [&](auto tokens) {
    constexpr int kTokens = decltype(tokens)::value;
    const int columns = phase.width / kFour, times = (columns + kMostThreads - 1) / kMostThreads;
    const int threads = ((columns + times - 1) / times + 31) / 32 * 32;
    const dim3 grid(static_cast<unsigned>(phase.next_x == nullptr ? pass.m : kTokens));
    const auto launch = [&](auto of) {
      return launch_early<end_in_stream<kTokens, decltype(of)::value>>(grid, static_cast<unsigned>(threads), 0, stream, end);
    };
    if (times == 1) return launch(std::integral_constant<int, 1>());
    if (times == 2) return launch(std::integral_constant<int, 2>());
    return times <= 4 ? launch(std::integral_constant<int, 4>()) : cudaErrorInvalidValue;
  });
}

cudaError_t launch_heads(const DecodePass& pass, const PassPhase& product, const PassPhase& attention, const Sums& sums,
                         Stream stream) {
  const OfHeads end{.sums = sums,
                    .rule = HeadRule(pass, attention),
                    .y = product.y,
                    .keys = attention.keys,
                    .values = attention.values,
                    .q_norm = attention.q_norm,
                    .k_norm = attention.k_norm,
                    .positions = pass.positions,
                    .slots = pass.slots,
                    .m = pass.m,
                    .heads = pass.heads,
                    .kv_heads = pass.kv_heads};
  const int units = pass.m * (pass.heads + 2 * pass.kv_heads), each = kEndThreads / 32;
  const dim3 grid(static_cast<unsigned>((units + each - 1) / each));
  if (pass.head_dim <= 64) return launch_early<end_in_heads<64>>(grid, kEndThreads, 0, stream, end);
  if (pass.head_dim <= 128) return launch_early<end_in_heads<128>>(grid, kEndThreads, 0, stream, end);
  return launch_early<end_in_heads<256>>(grid, kEndThreads, 0, stream, end);
}

/// Memory in the order of a product (lay_x()).
struct Laid {
  unsigned char *own, *next;  ///< Of its x; of the x that the kernel behind it writes for the next product.
  bool is_there;              ///< In `own`, x is there already.
};

/// @param attention  the phase behind a product of heads: y is qkv, whose queries alone are written, and keys and values are in the cache.
cudaError_t launch_product(const WidePass& work, const PassPhase& product, const PassPhase* attention, const Laid& laid,
                           int multiprocessors, Stream stream) {
  const DecodePass& pass = work.pass;
  const GemmFourBitGroup group = group_of(pass, product, work.partial);
  if (const cudaError_t error = sum_wide_rows(group, laid.own, laid.is_there, multiprocessors, stream); error != cudaSuccess)
    return error;
  Work of_group = work_of(group, kHeight);
  of_group.splits = multiprocessors;
  const Sums sums(of_group);
  if (attention != nullptr) return launch_heads(pass, product, *attention, sums, stream);
  if (product.stream != nullptr) return launch_stream(pass, product, sums, laid.next, stream);
  return with_tokens(pass.m, [&](auto tokens) {
    constexpr int kTokens = decltype(tokens)::value;
    if (!product.gated) return launch_finish<T, kTokens>(of_group, stream);
    const Gated end{
        .sums = sums, .h = product.y, .next = laid.next, .m = pass.m, .width = product.width, .activation = product.activation};
    const auto columns = static_cast<unsigned>(product.width / kFour);
    return launch_early<end_gated<kTokens>>(dim3((columns + kEndThreads - 1) / kEndThreads, kTokens), kEndThreads, 0, stream, end);
  });
}

DecodeAttention attention_of(const WidePass& work, const PassPhase& phase, int multiprocessors) {
  const DecodePass& pass = work.pass;
  const int64_t dim = pass.head_dim, most = phase.window > 0 ? std::min<int64_t>(phase.window, work.longest) : work.longest;
  DecodeAttention attention{.type = Float::kBFloat16,
                            .q = phase.x,
                            .k = phase.keys,
                            .v = phase.values,
                            .out = phase.y,
                            .partial = work.partial,
                            .starts = pass.starts,
                            .lengths = pass.lengths,
                            .shared_starts = pass.shared_starts,
                            .shared_lengths = pass.shared_lengths,
                            .q_row_stride = (pass.heads + 2 * pass.kv_heads) * dim,
                            .q_head_stride = dim,
                            .slot_stride = pass.kv_heads * dim,
                            .kv_head_stride = dim,
                            .rows = pass.m,
                            .heads = pass.heads,
                            .kv_heads = pass.kv_heads,
                            .head_dim = dim,
                            .window = phase.window,
                            .scale = static_cast<float>(static_cast<double>(phase.scale) / std::numbers::log2e)};
  divide_keys(attention, most, multiprocessors);
  return attention;
}

}  // namespace

bool has_wide_pass(const WidePass& work) {
  constexpr int kMostColumns = 4 * kMostThreads * kFour;
  return work.pass.m <= 128 && work.pass.head_dim % 8 == 0 && work.pass.head_dim <= 256 &&
         std::ranges::all_of(work.phases, [&](const PassPhase& phase) {
           const bool fits = phase.stream == nullptr || (phase.width <= kMostColumns && phase.width % kFour == 0);
           return fits && (phase.kind != PassKind::kProduct || goes_wide(group_of(work.pass, phase, nullptr)));
         });
}

int64_t wide_pass_floats(const WidePass& work, int multiprocessors) {
  int64_t most = 0;
  for (const PassPhase& phase : work.phases) {
    if (phase.kind == PassKind::kProduct)
      most = std::max(most, wide_sums_floats(group_of(work.pass, phase, nullptr), multiprocessors));
    if (phase.kind == PassKind::kAttention)
      most = std::max(most, decode_partial_floats(attention_of(work, phase, multiprocessors)));
  }
  return most;
}

int64_t wide_pass_bytes(const WidePass& work) {
  int64_t columns = 0;
  for (const PassPhase& phase : work.phases) columns = std::max<int64_t>(columns, phase.k);
  return 2 * laid_bytes(tokens_of(work.pass.m), columns);  // a phase's x, and what it writes
}

cudaError_t wide_pass(const WidePass& work, int multiprocessors, Stream stream) {
  Laid laid{.own = work.laid, .next = work.laid + wide_pass_bytes(work) / 2, .is_there = false};
  const void* laid_x = nullptr;  // the matrix that lies in laid.own
  for (size_t i = 0; i < work.phases.size(); ++i) {
    const PassPhase& phase = work.phases[i];
    const void* const written = phase.gated ? phase.y : phase.next_x;  // and laid
    laid.is_there = laid_x == phase.x;
    cudaError_t error = cudaSuccess;
    switch (phase.kind) {
      case PassKind::kAttention:
        error = decode_attention(attention_of(work, phase, multiprocessors), stream);
        break;
      case PassKind::kSum:
        error = launch_stream(work.pass, phase, Sums(work_of(group_of(work.pass, phase, nullptr), kHeight)), laid.next, stream);
        break;
      case PassKind::kProduct: {
        const PassPhase* const after = i + 1 < work.phases.size() ? &work.phases[i + 1] : nullptr;
        error = launch_product(work, phase, after != nullptr && after->kind == PassKind::kAttention ? after : nullptr, laid,
                               multiprocessors, stream);
        break;
      }
    }
    if (error != cudaSuccess) return error;
    if (written != nullptr) std::swap(laid.own, laid.next);
    laid_x = written;
  }
  return cudaSuccess;
}

}  // namespace qlorapp::cuda
