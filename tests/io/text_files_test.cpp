// SPDX-License-Identifier: Apache-2.0
/// Tokenizer and template of a folder are copied as bytes; a chosen template takes the place of all others.
#include "qlorapp/io/text_files.hpp"

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;

namespace {

const std::string kConfig = R"({"chat_template": [{"name": "default", "template": "{{ 1 }}"}], "eos_token": "</s>"})";

/// A model's folder with two templates, and files that are no text.
void write_model(const TemporaryFolder& folder) {
  for (const char* name : {"tokenizer.json", "merges.txt", "special_tokens_map.json", "config.json", "generation_config.json",
                           "preprocessor_config.json", "model.safetensors", "README.md", "qwen.tiktoken"})
    (void)folder.write(name, name);
  (void)folder.write("tokenizer_config.json", kConfig);
  (void)folder.write("chat_template.jinja", "own");
  std::filesystem::create_directory(folder / "additional_chat_templates");
  (void)folder.write("additional_chat_templates/rag.jinja", "rag");
  (void)folder.write("additional_chat_templates/notes.txt", "no template");
}

std::vector<std::string> written(const TextFiles& text, const TemporaryFolder& into) {
  text.write(into.path());
  std::vector<std::string> names = files::names_in(into.path());
  const std::string more = "additional_chat_templates";
  if (std::erase(names, more) > 0)
    for (const std::string& name : files::names_in(into / more)) names.push_back(more + "/" + name);
  return names;
}

}  // namespace

TEST_CASE("the files of tokenizer and template are copied as bytes, and no others", "[io][cpu]") {
  const TemporaryFolder model, adapter, nothing;
  write_model(model);
  const TextFiles text(model.path());
  CHECK(written(text, adapter) == std::vector<std::string>{"chat_template.jinja", "merges.txt", "qwen.tiktoken",
                                                           "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
                                                           "additional_chat_templates/rag.jinja"});
  CHECK(adapter.read("tokenizer_config.json") == kConfig);
  CHECK(adapter.read("chat_template.jinja") == "own");
  CHECK(text.other_than(adapter.path()).empty());
  CHECK(TextFiles(nothing.path()).empty());
  CHECK(TextFiles::has_tokenizer(adapter.path()));
  CHECK_FALSE(TextFiles::has_tokenizer(nothing.path()));
}

TEST_CASE("a chosen template is the only one of its result", "[io][cpu]") {
  const TemporaryFolder model, adapter;
  write_model(model);
  const TextFiles text(model.path(), "chosen");
  CHECK(written(text, adapter) == std::vector<std::string>{"chat_template.jinja", "merges.txt", "qwen.tiktoken",
                                                           "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"});
  CHECK(adapter.read("chat_template.jinja") == "chosen");
  const auto config = nlohmann::json::parse(adapter.read("tokenizer_config.json"));
  CHECK(config == nlohmann::json{{"eos_token", "</s>"}});
  CHECK(TextFiles(model.path()).other_than(adapter.path()) ==
        std::vector<std::string>{"additional_chat_templates/rag.jinja", "chat_template.jinja", "tokenizer_config.json"});
}

TEST_CASE("the files of other texts are named, and what is no text is none", "[io][cpu]") {
  const TemporaryFolder model, adapter;
  write_model(adapter);
  (void)model.write("tokenizer.json", "new");
  const TextFiles text(model.path());
  CHECK(text.others_in(adapter.path()) == std::vector<std::string>{"additional_chat_templates/rag.jinja", "chat_template.jinja",
                                                                   "merges.txt", "qwen.tiktoken", "special_tokens_map.json",
                                                                   "tokenizer_config.json"});
  CHECK(text.others_in(adapter.path(), /*vocabularies=*/false) ==
        std::vector<std::string>{"additional_chat_templates/rag.jinja", "chat_template.jinja", "special_tokens_map.json",
                                 "tokenizer_config.json"});
}

TEST_CASE("a link that leads out of the folder is not followed", "[io][cpu]") {
  const TemporaryFolder model, secret;
  (void)secret.write("secret", "secret");
  std::filesystem::create_symlink(secret / "secret", model / "chat_template.jinja");
  CHECK(has(thrown<FormatError>([&] { TextFiles text(model.path()); }), "chat_template.jinja] a link in a model folder must be"));
  const TemporaryFolder more;
  std::filesystem::create_directory_symlink(secret.path(), more / "additional_chat_templates");
  (void)secret.write("x.jinja", "secret");
  CHECK(TextFiles(more.path()).empty());
}
