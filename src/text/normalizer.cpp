// SPDX-License-Identifier: Apache-2.0
#include "normalizer.hpp"

#include <algorithm>
#include <cstdint>

#include "nfc.hpp"

namespace qlorapp {

bool Normalizer::keeps(std::string_view text) const {
  return std::all_of(steps_.begin(), steps_.end(), [&](const TextStep& step) {
    switch (step.kind) {
      case TextStep::Kind::kPrepend:
        return text.empty();
      case TextStep::Kind::kReplace:
        return text.find(step.pattern) == std::string_view::npos;
      case TextStep::Kind::kNfc:  // keeps ASCII
        return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0x80; });
    }
    return false;
  });
}

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
