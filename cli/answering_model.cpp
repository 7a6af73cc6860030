// SPDX-License-Identifier: Apache-2.0
#include "answering_model.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "io/adapter_file.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/adapter.hpp"

namespace qlorapp::cli {
namespace {

/// Opens, settles and checks what the other members are made of.
std::vector<std::string> opened(ModelOptions& model, GenerationOptions& options, const CommandLine& line,
                                std::vector<std::string> adapters) {
  model.open();
  options.settle(line);
  std::erase(adapters, "");
  for (const std::string& adapter : adapters) check_adapter_folder("adapter", adapter);
  return adapters;
}

}  // namespace

AnsweringModel::AnsweringModel(ModelOptions& model, GenerationOptions& options, const CommandLine& line,
                               std::vector<std::string> adapters)
    : model_(model),
      adapters_(opened(model, options, line, std::move(adapters))),
      config_(model.config()),
      computed_(model.choose_dtype(config_)),
      tools_(model.text_tools(adapters_.empty() ? "" : adapters_.front())) {
  if (!adapters_.empty()) config_.vocab_size = adapter_vocab_size(adapters_.front(), config_.vocab_size);
  if (computed_.is_substitute) log_warning(message("computes in {}", computed_.reason));  // stdout is the answers'
}

PlanSettings AnsweringModel::plan_settings() const {
  PlanSettings settings = model_.plan_settings(model_.config(), computed_.dtype);  // that is loaded, before the adapter's tables
  if (has_adapter()) settings.lora = lora_of_adapter(adapters_.front());
  return settings;
}

CausalLM AnsweringModel::load(GenerationOptions& options, bool chat) {
  CausalLM model = model_.load(computed_.dtype);
  for (const std::string& adapter : adapters_) {
    std::string name = files::file_name(adapter);
    std::ranges::replace(name, '.', '_');  // PEFT's names have none
    load_adapter(model, adapter, name.empty() ? kDefaultAdapter : name);
  }
  options.add_ends(model, tools_, chat);
  return model;
}

}  // namespace qlorapp::cli
