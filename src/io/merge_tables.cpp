// SPDX-License-Identifier: Apache-2.0
#include "merge_tables.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "stored_names.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 2> kHeads{"lm_head", "embed_out"};
constexpr std::array<std::string_view, 4> kEmbeddings{"embed_tokens", "wte", "word_embeddings", "embed_in"};

/// Does the tensor, or module, end in one of these words?
template <class Words>
bool is_one_of(std::string_view name, const Words& words) {
  if (name.ends_with(kWeightSuffix)) name.remove_suffix(kWeightSuffix.size());
  const std::string_view word = name.substr(name.rfind('.') + 1);
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// As the adapter calls it, if it does.
std::string head_name(const AdapterTensors& parts) {
  for (const auto& [module, lora] : parts.modules) {
    if (is_one_of(module, kHeads)) return module + std::string(kWeightSuffix);
  }
  for (const auto& [name, saved] : parts.saved) {
    if (name.ends_with(kWeightSuffix) && is_one_of(name, kHeads)) return name;
  }
  return "lm_head.weight";
}

}  // namespace

MergeTables::MergeTables(std::vector<MergedTensor>& tensors, const BaseConfig& config, const AdapterFile& adapter,
                         const AdapterTensors& parts, const SameValues& same)
    : tensors_(tensors), config_(config), adapter_(adapter), same_(same) {
  std::vector<size_t> found, usual;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const MergedTensor& tensor = tensors[i];
    if (tensor.shape.size() != 2 || !tensor.name.ends_with(kWeightSuffix) || count_numbers(tensor.name) > 0) continue;
    if (is_one_of(tensor.name, kHeads)) {
      head_ = i;
      continue;
    }
    if (config.vocab_size && tensor.shape[0] != *config.vocab_size) continue;
    (is_one_of(tensor.name, kEmbeddings) ? usual : found).push_back(i);
  }
  if (usual.size() == 1) embedding_ = usual[0];
  else if (usual.empty() && found.size() == 1 && config.vocab_size) embedding_ = found[0];
  if (!embedding_) return;
  rows_ = embedding().shape[0];
  if (head_) {
    differed_ = config.tie_word_embeddings.value_or(false) && !is_one_table();
    if (!differed_) return;
    log_warning_once(message(
        "[merge] {} says tie_word_embeddings: true, but '{}' and '{}' have other values. Both are used, as transformers does; "
        "the merged config.json says false.",
        config.path, embedding().name, head().name));
    return;
  }
  MergedTensor head = embedding();
  head.name = head_name(parts);
  head_ = tensors.size();
  added_ = true;
  tensors.push_back(std::move(head));
}

void MergeTables::share_saved() {
  if (!embedding_ || !added_) return;
  const auto is_own = [&](const MergedTensor& tensor, std::string_view name) {
    if (tensor.from.file != &adapter_.file) return false;
    const std::string module(name.substr(0, name.size() - kWeightSuffix.size()));
    return !adapter_.lora.saves(module);
  };
  const auto share = [](const MergedTensor& from, MergedTensor& to) {
    to.from = from.from;
    to.shape = from.shape;
  };
  const bool embedding_saved = embedding().from.file == &adapter_.file, head_saved = head().from.file == &adapter_.file;
  if (embedding_saved && !head_saved && is_own(embedding(), embedding().name)) share(embedding(), head());
  if (head_saved && !embedding_saved && is_own(head(), head().name)) share(head(), embedding());
}

bool MergeTables::is_one_table() const {
  const MergedTensor &left = embedding(), &right = head();
  if (left.shape != right.shape || left.from.tensor == nullptr || right.from.tensor == nullptr) return false;
  const bool same_start = left.from.tensor == right.from.tensor || same_(left.from, right.from);
  if (!same_start || (left.lora == nullptr && right.lora == nullptr)) return same_start;
  // Matrices that PEFT ties are each other's transposes: rows of the table are the embedding's inputs and the head's outputs.
  if (left.lora == nullptr || right.lora == nullptr || !left.lora->embedding || right.lora->embedding) return false;
  if (left.lora->magnitude != nullptr || right.lora->magnitude != nullptr) return false;
  const auto equal = [&](const format::TensorEntry& a, const format::TensorEntry& b) {
    return at::equal(read_value(adapter_.file, a.name), read_value(adapter_.file, b.name).t());
  };
  return adapter_.lora.scaling_of(left.module) == adapter_.lora.scaling_of(right.module) && equal(*left.lora->a, *right.lora->b) &&
         equal(*left.lora->b, *right.lora->a);
}

void MergeTables::settle(MergedTensors& result) {
  if (!embedding_) return;
  const MergedTensor &left = embedding(), &right = head();
  const bool one = is_one_table(), saved = left.from.file == &adapter_.file && right.from.file == &adapter_.file;
  QLORAPP_CHECK_FORMAT(
      one || !saved || !adapter_.lora.ensure_weight_tying || config_.tie_word_embeddings == false,
      "[adapter] {}: '{}' and '{}' must be equal, because adapter_config.json ties them (ensure_weight_tying); they "
      "differ.",
      adapter_.file.path(), left.from.tensor->name, right.from.tensor->name);
  QLORAPP_CHECK_FORMAT(left.shape == right.shape,
                       "[merge] embedding and head must have one shape; '{}' would have {} and '{}' {}. Save both tables with the "
                       "adapter: save_pretrained(folder, save_embedding_layers=True).",
                       left.name, joined(left.shape), right.name, joined(right.shape));
  if (left.shape[0] != rows_) result.vocab_size = left.shape[0];
  const auto touched = [&](const MergedTensor& tensor) { return tensor.lora != nullptr || tensor.from.file == &adapter_.file; };
  const bool tied_before = added_ || (config_.tie_word_embeddings != false && (touched(left) || touched(right)));
  result.separates_head = differed_ || (tied_before && !one);
  if (added_ && one) tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(*head_));
}

}  // namespace qlorapp
