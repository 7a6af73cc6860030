// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "file_folders.hpp"
#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "format/gguf.hpp"
#include "format/gguf_config.hpp"
#include "format/gguf_folders.hpp"
#include "json/python_json.hpp"
#include "qlorapp/io/gguf.hpp"
#include "text/gguf_vocabulary.hpp"

namespace qlorapp {
namespace {

using format::GgufFile;

GgufVocabulary vocabulary_of(const GgufFile& file) {
  GgufVocabulary out;
  const auto text = [&](const char* name) { return file.get<std::string>(message("tokenizer.ggml.{}", name)); };
  const auto truth = [&](const char* name) { return file.get<int64_t>(message("tokenizer.ggml.{}", name)); };
  const auto id = [&](const char* name) -> std::optional<TokenId> {
    const auto found = truth(name);
    const bool is_token = found && *found >= 0 && *found < std::ssize(out.tokens);  // 2³²-1 is none
    return is_token ? std::optional(static_cast<TokenId>(*found)) : std::nullopt;
  };
  out.model = file.require<std::string>("tokenizer.ggml.model");
  out.pre = text("pre").value_or("default");
  out.tokens = file.require<std::vector<std::string>>("tokenizer.ggml.tokens");
  const auto types = file.require<std::vector<int64_t>>("tokenizer.ggml.token_type");
  out.types.assign(types.begin(), types.end());
  const auto scores = file.get<std::vector<double>>("tokenizer.ggml.scores").value_or(std::vector<double>{});
  out.scores.assign(scores.begin(), scores.end());
  out.merges = file.get<std::vector<std::string>>("tokenizer.ggml.merges").value_or(std::vector<std::string>{});
  out.bos = id("bos_token_id");
  out.eos = id("eos_token_id");
  out.pad = id("padding_token_id");
  out.unknown = id("unknown_token_id");
  for (const char* const name : {"eot_token_id", "eom_token_id"}) {
    if (const auto end = id(name)) out.other_ends.push_back(*end);
  }
  // What llama.cpp assumes where a file does not say it.
  constexpr auto kWithBos = std::to_array<std::string_view>({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"});
  const bool characters = out.model == "llama";
  const bool has_bos = characters || std::ranges::find(kWithBos, out.pre) != kWithBos.end();
  out.adds_bos = truth("add_bos_token").value_or(has_bos ? 1 : 0) != 0;
  out.adds_eos = truth("add_eos_token").value_or(0) != 0;
  out.adds_space = truth("add_space_prefix").value_or(characters ? 1 : 0) != 0;
  return out;
}

void write_files(const GgufFile& file, const std::string& folder) {
  const auto write = [&](const char* name, const std::string& text) {
    files::write_file_atomically(files::path_in(folder, name), text);
  };
  const GgufVocabulary vocabulary = vocabulary_of(file);
  const TokenizerTexts texts = tokenizer_texts(vocabulary, file.path());
  write("tokenizer.json", texts.tokenizer);
  write("tokenizer_config.json", texts.config);
  if (const auto jinja = file.get<std::string>("tokenizer.chat_template")) write("chat_template.jinja", *jinja);
  format::Json ends = format::Json::array();
  if (vocabulary.eos) ends.push_back(*vocabulary.eos);
  for (const TokenId end : vocabulary.other_ends) ends.push_back(end);
  format::Json generation = format::Json::object();
  if (vocabulary.bos) generation["bos_token_id"] = *vocabulary.bos;
  if (!ends.empty()) generation["eos_token_id"] = ends;
  write("generation_config.json", format::dump_python_json(generation, format::kConfigStyle) + "\n");
  write("config.json", format::gguf_config_json(file));
}

}  // namespace

bool is_gguf_file(const std::string& path) {
  if (!files::is_regular_file(path)) return false;
  std::array<std::byte, 4> magic{};
  const files::FileReader file(path);
  if (file.size() >= std::ssize(magic)) file.read_at(0, magic);
  return path.ends_with(".gguf") || std::memcmp(magic.data(), "GGUF", magic.size()) == 0;
}

std::string model_folder(const std::string& path) {
  if (!is_gguf_file(path)) return path;
  return folder_for_file(path, "model", [&](const std::string& folder) {
    write_files(GgufFile(path), folder);
    const std::unique_ptr<char, decltype(&std::free)> full(::realpath(path.c_str(), nullptr), &std::free);
    format::set_gguf_of(folder, full ? full.get() : path);  // the program may change its folder before it reads the weights
    set_model_path(folder, path);
  });
}

namespace {

struct Names {
  std::mutex mutex;
  std::map<std::string, std::string> by_folder;
};
Names& names() {
  static Names all;
  return all;
}

}  // namespace

std::string model_path(const std::string& folder) {
  const std::lock_guard lock(names().mutex);
  const auto found = names().by_folder.find(folder);
  return found == names().by_folder.end() ? folder : found->second;
}

void set_model_path(const std::string& folder, const std::string& name) {
  const std::lock_guard lock(names().mutex);
  names().by_folder[folder] = name;
}

}  // namespace qlorapp
