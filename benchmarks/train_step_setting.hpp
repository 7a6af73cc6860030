// SPDX-License-Identifier: Apache-2.0
/// What the programs of this folder measure: shapes of real models, batches, and the settings of a step as words NAME=VALUE.
#pragma once

#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>

#include "core/check.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/memory/known_models.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/memory_settings.hpp"

namespace qlorapp::bench {

inline format::ModelConfig config_of(const std::string& model) {
  for (const auto& [name, known] :
       {std::pair{"70b", "llama-3.1-70b"}, {"8b", "llama-3.1-8b"}, {"3b", "llama-3.2-3b"}, {"1b", "llama-3.2-1b"}}) {
    if (model == name) return find_model_config(known);
  }
  return find_model_config(model);
}

/// On the GPU.
inline Batch random_batch(int64_t rows, int64_t length, int64_t vocabulary) {
  return Batch::of_equal_rows(at::randint(0, vocabulary, {rows, length}, at::TensorOptions().dtype(at::kLong).device(at::kCUDA)));
}

/// Rows of these lengths, each at least 2.
inline Batch random_batch(const std::vector<int64_t>& lengths, int64_t vocabulary) {
  Batch all = random_batch(1, lengths.front(), vocabulary);
  for (size_t i = 1; i < lengths.size(); ++i) {
    const Batch row = random_batch(1, lengths[i], vocabulary);
    all.tokens = at::cat({all.tokens, row.tokens});
    all.targets = at::cat({all.targets, row.targets});
    all.positions = at::cat({all.positions, row.positions});
    all.row_starts.push_back(all.token_count() + lengths[i]);
    all.target_count += row.target_count;
  }
  return all;
}

/// r = 16 on all seven linear layers.
inline LoraConfig lora_config() {
  LoraConfig lora;
  lora.r = 16;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
  return lora;
}

struct Setting {
  int64_t rows = 2, length = 2048;
  std::vector<int64_t> lengths;  ///< Of rows that differ, in place of the two above.
  std::string keep = "everything";
  MemorySettings memory;
  bool float8 = false;
  double cap = 0;  ///< GiB.
  std::string budget;
  int64_t effective_batch = 0;

  /// @returns false if the word is no NAME=VALUE.
  bool set(const std::string& word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    if (name == "batch") rows = std::stoll(value);
    else if (name == "sequence") length = std::stoll(value);
    else if (name == "lengths") {
      std::istringstream numbers(value);
      lengths.clear();
      for (std::string number; std::getline(numbers, number, ',');) lengths.push_back(std::stoll(number));
      rows = 1;
      length = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    } else if (name == "keep") keep = value;
    else if (name == "loss_chunk_rows") memory.loss_chunk_rows = std::stoll(value);
    else if (name == "mlp_tile_rows") memory.mlp_tile_rows = std::stoll(value);
    else if (name == "weight_workspace") memory.weight_workspace = parse_weight_workspace(value);
    else if (name == "embedding_on_host") memory.embedding_on_host = value != "0";
    else if (name == "base_on_host") memory.base_on_host = value != "0";
    else if (name == "fp8") float8 = value != "0";
    else if (name == "cap") cap = std::stod(value);
    else if (name == "budget") budget = value;
    else if (name == "effective_batch") effective_batch = std::stoll(value);
    else throw ValueError(message("no setting is called {}", name));
    return true;
  }

  /// What set() takes, for another process.
  [[nodiscard]] std::string words() const {
    return message(
        "batch={} sequence={} keep={} loss_chunk_rows={} mlp_tile_rows={} weight_workspace={} embedding_on_host={} base_on_host={} "
        "fp8={}",
        rows, length, keep, memory.loss_chunk_rows, memory.mlp_tile_rows, to_string(memory.weight_workspace),
        memory.embedding_on_host ? 1 : 0, memory.base_on_host ? 1 : 0, float8 ? 1 : 0);
  }
};

}  // namespace qlorapp::bench
