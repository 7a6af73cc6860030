// SPDX-License-Identifier: Apache-2.0
#include "hub.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/retry.hpp"
#include "files/temporary_folder.hpp"
#include "python_service.hpp"

namespace qlorapp::cli {
namespace {

/// Of rows that are made here, for as long as the program runs; null before the first.
std::unique_ptr<files::TemporaryFolder>& made() {
  static std::unique_ptr<files::TemporaryFolder> folder;
  return folder;
}

std::string read_to_end(int from) {
  std::string text;
  std::array<char, 4096> piece{};
  for (ssize_t count = 0; (count = files::retrying([&] { return ::recv(from, piece.data(), piece.size(), 0); })) > 0;)
    text.append(piece.data(), static_cast<size_t>(count));
  return text;
}

/// @param where  revision, or folder of new files.  @param by_hand  the way out.
std::vector<std::string> ask(const std::string& what, const std::string& name, const std::string& where,
                             const std::string& by_hand) {
  const std::string script = service_script("hub_service.py");
  QLORAPP_CHECK_VALUE(
      !script.empty(), "[hub] {} Here, start the command as `python -m qlorapp`. {}",
      what == "rows"
          ? message("--data {} must be rows as text; got a Parquet file. In Python, pass datasets.load_dataset(…) to SFTTrainer.",
                    name)
          : message("there is no folder '{}'; names on the Hugging Face Hub are found by Python's packages.", name),
      by_hand);
  const PythonService service("hub", {script, what, name, where});
  const nlohmann::json reply = nlohmann::json::parse(read_to_end(service.socket()), nullptr, /*allow_exceptions=*/false);
  QLORAPP_CHECK_VALUE(reply.is_object() && (reply.contains("ok") || reply.contains("error")),
                      "[hub] {}: Python ended without an answer. {}", name, by_hand);
  if (reply.contains("error")) throw ValueError(message("[hub] {}: {}. {}", name, reply["error"].get<std::string>(), by_hand));
  return reply["ok"].get<std::vector<std::string>>();
}

}  // namespace

bool is_hub_name(const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == 0 || slash == std::string::npos || slash + 1 == text.size() || text.find('/', slash + 1) != std::string::npos)
    return false;
  // A path that was mistyped is none.
  for (const std::string_view end :
       {".gguf", ".safetensors", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".gz", ".parquet", ".ndjson"}) {
    if (text.ends_with(end)) return false;
  }
  if (files::is_folder(text.substr(0, slash))) return false;
  return text.front() != '.' && text.front() != '~' && text.find_first_of(" \\,") == std::string::npos && !files::exists(text);
}

std::string hub_folder(const std::string& name, std::string_view what, const std::string& revision) {
  const std::string by_hand = message("By hand: hf download {}{} --local-dir {}, and give --model {}.", name,
                                      what == "config" ? " config.json" : "", files::file_name(name), files::file_name(name));
  return ask(std::string(what), name, revision, by_hand).at(0);
}

std::vector<std::string> row_files(const std::string& name, Split split) {
  const bool parquet = name.ends_with(".parquet") && files::exists(name);
  if (!parquet && !is_hub_name(name)) return {name};
  const std::string by_hand =
      parquet ? std::string("Or convert it to .jsonl.")
              : message("By hand: hf download --repo-type dataset {} --local-dir {}, and --data with a file of it.", name,
                        files::file_name(name));
  if (!made()) made() = std::make_unique<files::TemporaryFolder>("hub");
  return ask(parquet ? "rows" : split == Split::kTrain ? "train" : "eval", name, made()->path(), by_hand);
}

void remove_made(const std::string& file) {
  if (made() && files::parent_of(file) == made()->path()) ::unlink(file.c_str());
}

}  // namespace qlorapp::cli
