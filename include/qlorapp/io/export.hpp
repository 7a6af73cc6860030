// SPDX-License-Identifier: Apache-2.0
/// A trained model for other programs: GGUF files for llama.cpp, Ollama and LM Studio, a merged checkpoint.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/io/merge.hpp"

namespace qlorapp {

/// By the name of a linear layer's weight: (in_features), the mean square of each input channel (train/importance.hpp).
using Importance = std::map<std::string, std::vector<float>>;

struct ExportOptions {
  std::string gguf;          ///< File for llama.cpp, Ollama and LM Studio: the model, with the adapter merged.
  std::string gguf_adapter;  ///< File: the adapter alone, for llama.cpp's --lora over any GGUF file of its base.
  std::string ollama;        ///< New or empty folder for `ollama create`: a GGUF file and a Modelfile.
  std::string ollama_base;   ///< With ollama: a model there, or a GGUF file, over which the adapter alone is to run.
  std::string merged;        ///< New or empty folder: as merge_adapter() writes it.
  /// peft, transformers, vllm, sglang or llama.cpp: the adapter alone in the form that it reads. Scales that it does not read are multiplied
  /// into B, ranks are made equal with zeros; what it ignores or refuses is refused here, by the names of the tensors. docs/export.md has
  /// versions and rules.
  std::string adapter_for;
  std::string output;  ///< With adapter_for: new or empty folder, a PEFT folder; for llama.cpp a file.
  /// Of a model's weights F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M (the default) or Q4_0, as llama.cpp names them. Norms, biases and rope
  /// factors are in float32 in all of them. *_M stores the head, and values and down projections of half of the layers, in Q6_K, as
  /// llama.cpp does. Rows that are no whole number of 256 are stored in Q8_0, of 32 in F16. Of an adapter F32 (the default), F16 or BF16.
  std::string type;
  /// With gguf and ollama: a name of ChatTemplate::names() or the path of a .jinja file, in place of the folder's own template.
  std::string chat_template;
  /// With gguf and ollama: rounding errors of linear layers are weighted by what it returns, in Q6_K and below. Called once, after all else was
  /// checked. Empty: all count alike.
  std::function<Importance()> importance;
  MergeOptions merge;  ///< Of what is merged. dtype and max_shard_size: with merged.
};

/// The names that a model's ExportOptions::type may have.
[[nodiscard]] std::span<const std::string_view> gguf_types();

/// Writes one of the targets; one weight is in memory at a time. A file or folder appears whole or not at all; room for a GGUF file is
/// claimed before the first tensor.
///
/// A GGUF file holds the tokenizer and the chat template of the adapter, or else of the model. That of an adapter holds matrices that are
/// scaled by lora_alpha / rank; rsLoRA and alpha_pattern are multiplied into B. A Modelfile has template, stop tokens and the settings of
/// generation_config.json.
/// @param model    a folder; for an adapter alone its config.json is enough.
/// @param adapter  a PEFT folder; empty: none.
/// @returns the path that was written.
/// @throws ValueError for no target or two, or an option without a use; UnsupportedModel for a family or an option of it that llama.cpp
///         does not compute, before anything is written; FormatError naming the tensor that an adapter file does not hold (DoRA, biases,
///         saved modules, adapters of shared tables), for a tokenizer that llama.cpp does not know, and a chat template that Ollama's
///         language has no form for; as merge_adapter.
std::string export_model(const std::string& model, const std::string& adapter, const ExportOptions& options);

}  // namespace qlorapp
