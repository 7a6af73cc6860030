// SPDX-License-Identifier: Apache-2.0
#include "nn/decode_adapters.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "adapters/adapter_set.hpp"
#include "adapters/dora.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {
namespace {

/// Whether every matrix lies in the arena.
bool lie_in(const AdapterSet& set) {
  return std::ranges::all_of(set.blocks, [&](const auto& block) {
    return std::ranges::all_of(block, [&](const std::optional<LoraAdapter>& adapter) {
      return !adapter || (adapter->a.is_alias_of(set.arena.values()) && adapter->b.is_alias_of(set.arena.values()));
    });
  });
}

}  // namespace

JoinedInputs JoinedInputs::of(std::span<const std::optional<DecodeAdapter>> adapters) {
  JoinedInputs all;
  const at::Tensor* first = nullptr;
  for (const auto& adapter : adapters) {
    if (!adapter) continue;
    if (first == nullptr) first = &adapter->a;
    all.together = all.together && adapter->a.storage_offset() == first->storage_offset() + all.rank * first->size(1);
    all.scaled = all.scaled || adapter->scale.defined();
    all.rank += adapter->a.size(0);
  }
  if (all.rank > 0 && all.together) all.a = first->as_strided({all.rank, first->size(1)}, first->strides());
  return all;
}

std::shared_ptr<DecodeAdapters> DecodeAdapters::of(const CausalLM& model) {
  if (!model.adapters().in_use()) return nullptr;
  const AdapterSet& set = model.adapters().active();
  if (!lie_in(set)) return nullptr;
  auto made = std::make_shared<DecodeAdapters>();
  made->source_ = &set;
  int64_t end = 0;
  for (const auto& block : set.blocks) {
    for (const auto& adapter : block) {
      if (adapter)
        end = std::max({end, adapter->a.storage_offset() + adapter->a.numel(), adapter->b.storage_offset() + adapter->b.numel()});
    }
  }
  made->values_ = at::empty({end}, set.arena.values().options().dtype(model.dtype()));
  for (const auto& block : set.blocks) {
    OfBlock& own = made->blocks_.emplace_back();
    for (const auto& adapter : block) {
      auto& one = own.emplace_back();
      if (!adapter) continue;
      const auto view = [&](const at::Tensor& x) { return made->values_.as_strided(x.sizes(), x.strides(), x.storage_offset()); };
      one = DecodeAdapter{.a = view(adapter->a), .b = view(adapter->b), .scaling = adapter->scaling, .scale = {}};
      if (adapter->magnitude.defined()) one->scale = at::empty({adapter->b.size(0)}, set.arena.values().options());
    }
  }
  return made;
}

bool DecodeAdapters::are_of(const CausalLM& model) const {
  return model.adapters().in_use() && source_ == &model.adapters().active() && lie_in(model.adapters().active());
}

void DecodeAdapters::refresh(const CausalLM& model) {
  const AdapterSet& set = model.adapters().active();
  values_.copy_(set.arena.values().detach().narrow(0, 0, values_.numel()));
  for (size_t block = 0; block < blocks_.size(); ++block) {
    for (size_t i = 0; i < blocks_[block].size(); ++i) {
      const auto& own = blocks_[block][i];
      if (!own || !own->scale.defined()) continue;
      const FrozenWeight& weight = model.decoder().projections(static_cast<int64_t>(block))[i];
      at::Tensor scale = own->scale;
      scale.copy_(dora_scale(weight, *set.blocks[block][i]).scale);
    }
  }
}

}  // namespace qlorapp
