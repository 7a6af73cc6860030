// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/export.hpp"

#include <ATen/core/grad_mode.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "export_targets.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp {
namespace {

/// Name and path of the one that is asked for.
std::pair<std::string_view, std::string> target_of(const ExportOptions& options) {
  QLORAPP_CHECK_VALUE(options.adapter_for.empty() || !options.output.empty(),
                      "[export] adapter_for needs output: the folder to write, or a file for llama.cpp.");
  const auto targets =
      std::to_array<std::pair<std::string_view, std::string>>({{"gguf", options.gguf},
                                                               {"gguf_adapter", options.gguf_adapter},
                                                               {"ollama", options.ollama},
                                                               {"merged", options.merged},
                                                               {"adapter_for", options.adapter_for.empty() ? "" : options.output}});
  std::vector<std::string_view> all, given;
  for (const auto& [name, path] : targets) {
    all.push_back(name);
    if (!path.empty()) given.push_back(name);
  }
  QLORAPP_CHECK_VALUE(given.size() == 1, "[export] needs one of {}; got {}.", joined(all), given.empty() ? "none" : joined(given));
  return *std::ranges::find(targets, given.front(), &std::pair<std::string_view, std::string>::first);
}

}  // namespace

std::string export_model(const std::string& model, const std::string& adapter, const ExportOptions& options) {
  const at::NoGradGuard no_grad;
  ops::mark_phase(ops::MemoryPhase::kMerge);
  const auto [target, path] = target_of(options);
  const bool alone = target == "gguf_adapter" || target == "adapter_for" || !options.ollama_base.empty();
  const auto only_with = [&, name = target](std::string_view option, bool given, bool has_use, std::string_view use) {
    QLORAPP_CHECK_VALUE(!given || has_use, "[export] {} has a use with {} alone; got {}. Leave it out.", option, use, name);
  };
  only_with("output", !options.output.empty(), target == "adapter_for", "adapter_for");
  only_with("ollama_base", !options.ollama_base.empty(), target == "ollama", "ollama");
  only_with("base", options.merge.base.has_value(), !alone, "a merged model");
  only_with("chat_template", !options.chat_template.empty(), target == "gguf" || target == "ollama", "gguf and ollama");
  only_with("importance", static_cast<bool>(options.importance), !alone && (target == "gguf" || target == "ollama"),
            "gguf and ollama");
  only_with("type", !options.type.empty(), target != "merged" && (target != "adapter_for" || options.adapter_for == "llama.cpp"),
            "gguf, gguf_adapter and ollama");
  QLORAPP_CHECK_VALUE(!adapter.empty() || (!alone && target != "merged"), "[export] {} needs an adapter.",
                      alone && target == "ollama" ? "ollama_base" : target);
  if (target == "gguf") export_gguf(model, adapter, path, options);
  else if (target == "gguf_adapter") export_gguf_adapter(model, adapter, path, options.type);
  else if (target == "ollama") export_ollama(model, adapter, path, options);
  else if (target == "adapter_for") export_for_server(model, adapter, path, options);
  else merge_adapter(model, adapter, path, options.merge);
  return path;
}

}  // namespace qlorapp
