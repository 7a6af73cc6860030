// SPDX-License-Identifier: Apache-2.0
#include "saved_tables.hpp"

#include <ATen/ATen.h>

#include <string_view>
#include <utility>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/adapter.hpp"

namespace qlorapp {
namespace {

struct SavedTables {
  const format::TensorEntry *embed_tokens = nullptr, *lm_head = nullptr;
  bool own_embed_tokens = false, own_lm_head = false;  ///< Not of modules_to_save.

  [[nodiscard]] bool resize(int64_t rows) const {
    const auto other = [&](const format::TensorEntry* table) { return table != nullptr && table->shape.at(0) != rows; };
    return other(embed_tokens) || other(lm_head);
  }
};

constexpr std::string_view kEmbedding = "embed_tokens", kHead = format::kHeadModule;

/// Whether a name without PEFT's prefix is of this module, which may stand in others: "model.embed_tokens.weight".
bool is_of(std::string_view name, std::string_view module) {
  const size_t at = name.find(message("{}.", module));
  return at == 0 || (at != name.npos && name[at - 1] == '.');
}

SavedTables saved_tables(const AdapterFile& adapter) {
  SavedTables tables;
  const auto find = [&](std::string_view word) {
    const format::TensorEntry* table = nullptr;
    const std::string end = message("{}.weight", word);
    for (const format::TensorEntry& entry : adapter.file.tensors()) {
      if (entry.name.starts_with(kPeftPrefix) && entry.name.ends_with(end) && is_of(entry.name.substr(kPeftPrefix.size()), word))
        table = &entry;
    }
    QLORAPP_CHECK_FORMAT(table == nullptr || table->shape.size() == 2, "[adapter] {}: '{}' must have two dimensions; got shape {}.",
                         adapter.file.path(), table->name, joined(table->shape));
    return table;
  };
  const auto saves = [&](const format::TensorEntry* table) {
    if (table == nullptr) return false;
    const std::string_view name = std::string_view(table->name).substr(kPeftPrefix.size());
    return adapter.lora.saves(name.substr(0, name.rfind('.')));
  };
  tables.embed_tokens = find(kEmbedding);
  tables.lm_head = find(kHead);
  tables.own_embed_tokens = tables.embed_tokens != nullptr && !saves(tables.embed_tokens);
  tables.own_lm_head = tables.lm_head != nullptr && !saves(tables.lm_head);
  // A tied table is saved twice, whichever of its names modules_to_save has.
  const bool shared = adapter.lora.ensure_weight_tying && (saves(tables.embed_tokens) || saves(tables.lm_head));
  if (shared) tables.own_embed_tokens = tables.own_lm_head = false;
  return tables;
}

bool is_wrappers(std::string_view name) {
  return name.find(".original_module.") != name.npos || name.find(".modules_to_save.") != name.npos;
}

}  // namespace

std::set<std::string> adopt_saved_tables(CausalLM& model, const AdapterFile& adapter) {
  std::set<std::string> used;
  for (const format::TensorEntry& entry : adapter.file.tensors()) {
    if (is_wrappers(entry.name)) used.insert(entry.name);
  }
  const SavedTables tables = saved_tables(adapter);
  Decoder& decoder = model.decoder();
  const bool tied = decoder.config().tie_word_embeddings;
  const bool resized = tables.resize(decoder.config().vocab_size);
  if (!resized && !tables.own_embed_tokens && !tables.own_lm_head) return used;
  const auto read = [&](const format::TensorEntry& table, const at::Tensor& like) {
    QLORAPP_CHECK_FORMAT(table.shape[1] == decoder.config().hidden_size,
                         "[adapter] {}: '{}' must have rows of {} values for this base model; got shape {}. It is the adapter of "
                         "another base model.",
                         adapter.file.path(), table.name, decoder.config().hidden_size, joined(table.shape));
    return read_value(adapter.file, table.name).to(like.options());
  };
  at::Tensor embed_tokens = decoder.embed_tokens(), lm_head = decoder.lm_head();
  const at::Tensor base = embed_tokens;
  const bool reads_embedding = tables.embed_tokens != nullptr && (resized || tables.own_embed_tokens);
  const bool reads_head = tables.lm_head != nullptr && (resized || tables.own_lm_head);
  if (reads_embedding) embed_tokens = read(*tables.embed_tokens, base);
  if (reads_head) lm_head = read(*tables.lm_head, lm_head);
  if (tied && reads_embedding && !reads_head) lm_head = embed_tokens;
  if (tied && reads_head && !reads_embedding) embed_tokens = lm_head;
  if (tied && reads_head && reads_embedding && at::equal(embed_tokens, lm_head)) lm_head = embed_tokens;
  QLORAPP_CHECK_FORMAT(
      embed_tokens.sizes() == lm_head.sizes(),
      "[adapter] {} must hold both tables with as many rows; the embedding would have {}, the head {}. Save them with "
      "save_pretrained(folder, save_embedding_layers=True).",
      adapter.file.path(), embed_tokens.size(0), lm_head.size(0));
  decoder.replace_tables(std::move(embed_tokens), std::move(lm_head));
  if (tables.own_embed_tokens) used.insert(tables.embed_tokens->name);
  if (tables.own_lm_head) used.insert(tables.lm_head->name);
  return used;
}

int64_t adapter_vocab_size(const std::string& folder, int64_t vocab_size) {
  const AdapterFile adapter = open_adapter(folder);  // the tables are entries of it
  const SavedTables tables = saved_tables(adapter);
  for (const format::TensorEntry* table : {tables.embed_tokens, tables.lm_head}) {
    if (table != nullptr) return table->shape.at(0);
  }
  return vocab_size;
}

bool brings_tables(const std::string& folder, int64_t vocab_size) {
  const AdapterFile adapter = open_adapter(folder);  // the tables are entries of it
  const SavedTables tables = saved_tables(adapter);
  return tables.own_embed_tokens || tables.own_lm_head || tables.resize(vocab_size);
}

void check_computes(const AdapterFile& adapter) {
  for (const format::TensorEntry& entry : adapter.file.tensors()) {
    if (!entry.name.starts_with(kPeftPrefix)) continue;  // refused elsewhere
    const std::string_view name = std::string_view(entry.name).substr(kPeftPrefix.size());
    const bool table = is_of(name, kEmbedding) || is_of(name, kHead), low_rank = name.find(".lora_") != name.npos;
    QLORAPP_CHECK_VALUE(
        table ? !low_rank : low_rank,
        "[adapter] {} changes '{}', which is merged but not computed beside its base. Merge it: qlorapp merge --model "
        "BASE --adapter ADAPTER --output OUTPUT; then use the merged model.",
        adapter.file.path(), name);
  }
}

}  // namespace qlorapp
