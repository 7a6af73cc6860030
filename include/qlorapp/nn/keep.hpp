// SPDX-License-Identifier: Apache-2.0
/// Activations that a block keeps from its forward to its backward pass, and segments of blocks that are recomputed together.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace qlorapp {

/// Trades memory for time. M tokens, D hidden, I intermediate, H·d attention width; elements a token beside each.
enum class Keep : uint8_t {
  kEverything,     ///< All that backward cannot cheaply form again: no GEMM is repeated.
  kAttentionOnly,  ///< The input and the attention output: D + H·d. Attention itself is not repeated.
  kInputOnly,      ///< The input alone: D. The rest of the block, but for down_proj, is computed again.
  kInputOnHost,  ///< The input, stored in pinned host memory (input_offload.hpp); uses no device memory. The model's last block keeps
                 ///< it on the device, because it is needed first. On a CPU: kInputOnly.
};

/// The name that parse_keep() accepts.
[[nodiscard]] std::string_view to_string(Keep keep);
/// @throws ValueError naming the nearest of everything, attention_only, input_only, input_on_host.
[[nodiscard]] Keep parse_keep(std::string_view text);

/// Consecutive blocks [begin, end) that backward treats as one. Of a segment of several blocks only the input of the first is
/// kept; backward runs its forward again, keeping everything inside the segment for that while.
struct Segment {
  int64_t begin = 0;
  int64_t end = 0;
  Keep keep = Keep::kEverything;  ///< Of several blocks: kInputOnHost, or anything else for the input on the device.
};

/// One segment a block, from a policy or a mixture: "input_only", "input_on_host,everything:12", "input_only:20,everything:12". Runs of
/// blocks from the first on; one of them may have no number and covers the other blocks. Several names and no number at all:
/// one a block.
///
/// Textbook schemes have names: "every:4" is checkpoint_every(blocks, 4), "sqrt" is checkpoint_sqrt(blocks). With ",input_on_host"
/// after them the inputs are stored in host memory. Every layer is "input_only", none "everything".
///
/// Keep more in the last blocks. Backward begins there, so their activations are freed before it reaches the blocks that compute again,
/// and those need the most memory.
/// @throws ValueError if a name is wrong, or the numbers do not add up to `blocks`.
[[nodiscard]] std::vector<Segment> parse_segments(std::string_view text, int64_t blocks);
/// The checks of parse_segments that need no model. @throws ValueError
void check_segments(std::string_view text);

/// One segment a block, all with the same policy.
[[nodiscard]] std::vector<Segment> keep_in_each_block(int64_t blocks, Keep keep);
/// Segments of k blocks (the last may be shorter): ceil(N / k) inputs are kept, k blocks are live in backward.
/// @param keep  kInputOnly or kInputOnHost.  @throws ValueError for another, and unless 1 <= k.
[[nodiscard]] std::vector<Segment> checkpoint_every(int64_t blocks, int64_t k, Keep keep = Keep::kInputOnly);
/// Segments of about √N blocks: O(√N) memory, the schedule of Chen et al. 2016, arXiv:1604.06174 §3.
[[nodiscard]] std::vector<Segment> checkpoint_sqrt(int64_t blocks, Keep keep = Keep::kInputOnly);

}  // namespace qlorapp
