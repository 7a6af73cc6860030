// SPDX-License-Identifier: Apache-2.0
#include "adapters/adapter_set.hpp"

namespace qlorapp {

void AdapterSet::bind() {
  for (size_t block = 0; block < slots.size(); ++block) {
    for (size_t i = 0; i < slots[block].size(); ++i) {
      const Slot& slot = slots[block][i];
      if (slot.a < 0) continue;
      LoraAdapter& adapter = *blocks[block][i];
      adapter.a = arena.parameter(slot.a);
      adapter.b = arena.parameter(slot.b);
      if (slot.magnitude >= 0) adapter.magnitude = arena.parameter(slot.magnitude);
    }
  }
}

std::vector<std::pair<std::string, at::Tensor>> AdapterSet::named_tensors() const {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (int64_t i = 0; i < arena.size(); ++i) tensors.emplace_back(arena.entries()[static_cast<size_t>(i)].name, arena.parameter(i));
  if (lm_head >= 0 && lm_head == embed_tokens) tensors.emplace_back("base_model.model.lm_head.weight", arena.parameter(lm_head));
  return tensors;
}

}  // namespace qlorapp
