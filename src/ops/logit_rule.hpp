// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace qlorapp::ops {

/// How products with the head become logits: z · factor, then cap·tanh(z / cap); 0: no cap (Gemma 2, Granite).
struct LogitRule {
  double factor = 1, cap = 0;

  [[nodiscard]] bool is_plain() const { return factor == 1 && cap == 0; }
};

}  // namespace qlorapp::ops
