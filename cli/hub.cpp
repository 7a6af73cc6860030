// SPDX-License-Identifier: Apache-2.0
#include "hub.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/retry.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace qlorapp::cli {
namespace {

/// Removed at the end.
struct Made {
  ~Made() {
    for (const std::string& path : paths) ::unlink(path.c_str());
  }
  std::vector<std::string> paths;
};
Made& made() {
  static Made files;
  return files;
}

std::string read_to_end(int from) {
  std::string text;
  std::array<char, 4096> piece{};
  for (ssize_t count = 0; (count = files::retrying([&] { return ::read(from, piece.data(), piece.size()); })) > 0;)
    text.append(piece.data(), static_cast<size_t>(count));
  return text;
}

/// Runs a Python script and returns its standard output.
std::string run(const std::string& python, std::vector<std::string> words) {
  words.insert(words.begin(), python);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) throw IoError("[hub] no pipe can be made.", errno);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe[1], STDOUT_FILENO);
  pid_t child = 0;
  const int failed = posix_spawn(&child, python.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe[1]);
  std::string text = failed == 0 ? read_to_end(pipe[0]) : std::string();
  ::close(pipe[0]);
  if (failed != 0)
    throw IoError(message("[hub] {} cannot be started: {}. Check QLORAPP_PYTHON.", python, std::strerror(failed)), failed);
  int status = 0;
  (void)files::retrying([&] { return ::waitpid(child, &status, 0); });
  return text;
}

/// @param by_hand  the way out.
std::vector<std::string> ask(const std::string& what, const std::string& name, const std::string& revision,
                             const std::string& by_hand) {
  const char *const python = std::getenv("QLORAPP_PYTHON"), *const text_service = std::getenv("QLORAPP_HF_TEXT");
  QLORAPP_CHECK_VALUE(
      python != nullptr && text_service != nullptr, "[hub] {} Here, start the command as `python -m qlorapp`. {}",
      what == "rows"
          ? message("--data {} must be rows as text; got a Parquet file. In Python, pass datasets.load_dataset(…) to SFTTrainer.",
                    name)
          : message("there is no folder '{}'; names on the Hugging Face Hub are found by Python's packages.", name),
      by_hand);
  const std::string script = files::path_in(files::parent_of(text_service), "hub_service.py");
  std::vector<std::string> words{script, what, name};
  if (!revision.empty()) words.push_back(revision);
  std::string line = run(python, std::move(words));  // the last one: packages may print, too
  if (line.ends_with('\n')) line.pop_back();
  line.erase(0, line.rfind('\n') + 1);
  const nlohmann::json reply = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
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
  std::vector<std::string> found = ask(parquet ? "rows" : split == Split::kTrain ? "train" : "eval", name, "", by_hand);
  for (const std::string& file : found) {
    if (files::file_name(file).starts_with("qlorapp-rows-")) made().paths.push_back(file);
  }
  return found;
}

void remove_made(const std::string& file) {
  if (std::erase(made().paths, file) != 0) ::unlink(file.c_str());
}

}  // namespace qlorapp::cli
