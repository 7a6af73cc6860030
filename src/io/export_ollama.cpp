// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "export_targets.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"
#include "text/gguf_vocabulary.hpp"
#include "text/ollama_template.hpp"

namespace qlorapp {
namespace {

using nlohmann::json;

/// Settings of generation_config.json, by Ollama's names.
constexpr auto kParameters =
    std::to_array<std::pair<std::string_view, std::string_view>>({{"temperature", "temperature"},
                                                                  {"top_k", "top_k"},
                                                                  {"top_p", "top_p"},
                                                                  {"min_p", "min_p"},
                                                                  {"repetition_penalty", "repeat_penalty"}});

std::string parameters_of(const std::string& model) {
  const std::string path = files::path_in(model, "generation_config.json");
  if (!files::exists(path)) return {};
  const json settings = files::read_json_inside(path, {.allow_nonfinite = true});
  std::string lines;
  if (settings.is_object() && settings.contains("do_sample") && settings["do_sample"] == false)
    lines += "PARAMETER temperature 0\n";
  for (const auto& [name, theirs] : kParameters) {
    const auto found = settings.find(name);
    if (found == settings.end() || !found->is_number()) continue;
    if (name == "temperature" && !lines.empty()) continue;
    lines += message("PARAMETER {} {}\n", theirs, found->dump());
  }
  return lines;
}

/// The text of a Modelfile behind its FROM.
std::string settings_of(const std::string& model, const std::string& adapter, const ExportOptions& options) {
  const std::string text = !adapter.empty() && TextFiles::has_tokenizer(adapter) ? adapter : model;
  const Tokenizer tokenizer = Tokenizer::from_folder(text, model);
  const auto token = [&](TokenId id) { return tokenizer.id_to_token(id).value_or(""); };
  std::optional<ChatTemplate> jinja;
  if (!options.chat_template.empty()) jinja = ChatTemplate::choose(options.chat_template, text);
  else jinja = ChatTemplate::from_folder(text);
  const GgufVocabulary vocabulary = gguf_vocabulary(text, model, tokenizer.id_limit(), jinja ? &*jinja : nullptr);
  std::string out;
  if (jinja) {
    const OllamaTemplate own(*jinja, vocabulary.adds_bos && vocabulary.bos ? token(*vocabulary.bos) : "");
    if (!own.has_system()) out += "# The chat template has no system message: SYSTEM changes nothing.\n";
    out += message("TEMPLATE \"\"\"{}\"\"\"\n", own.go());
  } else {
    out += "# The model has no chat template: text goes in as it is.\nTEMPLATE \"{{ .Prompt }}\"\n";
  }
  std::vector<TokenId> ends = vocabulary.other_ends;
  if (vocabulary.eos) ends.insert(ends.begin(), *vocabulary.eos);
  for (const TokenId id : ends) {
    std::string quoted = token(id);
    QLORAPP_CHECK_FORMAT(quoted.find_first_of("\"\n") == std::string::npos,
                         "[export] a stop token in a Modelfile must have no quotes and no line feed; got '{}'.", quoted);
    out += message("PARAMETER stop \"{}\"\n", quoted);
  }
  return out + parameters_of(model);
}

}  // namespace

void export_ollama(const std::string& model, const std::string& adapter, const std::string& folder, const ExportOptions& options) {
  const std::string& from = options.ollama_base;
  QLORAPP_CHECK_VALUE(from.find_first_of("\n\r") == std::string::npos, "[export] ollama_base must be one line; got '{}'.", from);
  const std::string settings = settings_of(model, adapter, options);
  files::FreshFolder fresh(folder);
  std::string head = "# ollama create NAME -f Modelfile\n";
  if (from.empty()) {
    export_gguf(model, adapter, files::path_in(fresh.path(), "model.gguf"), options);
    head += "FROM ./model.gguf\n";
  } else {
    export_gguf_adapter(model, adapter, files::path_in(fresh.path(), "adapter.gguf"), options.type);
    head += message("FROM {}\nADAPTER ./adapter.gguf\n", from);
  }
  files::write_file_atomically(files::path_in(fresh.path(), "Modelfile"), head + settings);
  fresh.keep();
}

}  // namespace qlorapp
