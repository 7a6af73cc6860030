// SPDX-License-Identifier: Apache-2.0
#include "normalizer.hpp"

#include "nfc.hpp"

namespace qlorapp {

AlignedText Normalizer::apply(const Section& section) const {
  AlignedText out(section);
  for (const TextStep& step : steps_) {
    switch (step.kind) {
      case TextStep::Kind::kPrepend:
        out.prepend(step.content);
        break;
      case TextStep::Kind::kReplace:
        out.replace(step.pattern, step.content);
        break;
      case TextStep::Kind::kNfc:
        to_nfc(out);
        break;
    }
  }
  return out;
}

}  // namespace qlorapp
