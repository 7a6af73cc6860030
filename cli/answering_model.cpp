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

/// Their folders' names; with that of the folder around where another adapter is called so already. PEFT's names have no dots.
std::vector<std::string> names_of(const std::vector<std::string>& adapters) {
  std::vector<std::string> names;
  for (const std::string& adapter : adapters) {
    const auto taken = [&](const std::string& name) { return name == "none" || std::ranges::find(names, name) != names.end(); };
    std::string name = files::file_name(adapter);
    if (name.find_first_not_of('.') == std::string::npos) name = kDefaultAdapter;  // ".", "..", "/"
    std::ranges::replace(name, '.', '_');
    if (taken(name)) {
      name = message("{}-{}", files::file_name(files::parent_of(adapter)), name);
      std::ranges::replace(name, '.', '_');
    }
    while (taken(name)) name += '_';
    names.push_back(std::move(name));
  }
  return names;
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
  const std::vector<std::string> names = names_of(adapters_);
  for (size_t i = 0; i < names.size(); ++i) load_adapter(model, adapters_[i], names[i]);
  options.add_ends(model, tools_, chat);
  return model;
}

}  // namespace qlorapp::cli
