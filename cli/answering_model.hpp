// SPDX-License-Identifier: Apache-2.0
/// The model of `generate` and `chat`: first what its folder says, then with its weights and adapters.
#pragma once

#include <string>
#include <vector>

#include "folder_text.hpp"
#include "generation_options.hpp"
#include "model_options.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp::cli {

class AnsweringModel {
 public:
  /// After parse(). Settles `options`, and warns if the model computes in another dtype than its own.
  /// @param adapters  PEFT folders; the first one's tokenizer and template are used if it has them.
  /// @throws ValueError, FormatError and IoError as ModelOptions; ValueError for a folder that holds a model in place of an adapter.
  AnsweringModel(ModelOptions& model, GenerationOptions& options, const CommandLine& line, std::vector<std::string> adapters);

  /// The vocabulary is that of the adapter's tables if it has some.
  [[nodiscard]] const format::ModelConfig& config() const { return config_; }
  [[nodiscard]] FolderText& tools() { return tools_; }
  /// That it is loaded on.
  [[nodiscard]] at::Device device() const { return parse_device(model_.device); }
  /// The settings of a plan for it, with the first adapter.
  [[nodiscard]] PlanSettings plan_settings() const;
  [[nodiscard]] bool has_adapter() const { return !adapters_.empty(); }
  /// Loads it, with every adapter under its folder's name; the first answers. Adds to `options` the tokens that end its answers.
  /// @param chat  whether its template is applied.
  [[nodiscard]] CausalLM load(GenerationOptions& options, bool chat);

 private:
  const ModelOptions& model_;
  std::vector<std::string> adapters_;
  format::ModelConfig config_;
  ComputeDtype computed_;
  FolderText tools_;
};

}  // namespace qlorapp::cli
