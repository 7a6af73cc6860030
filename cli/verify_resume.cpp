// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "command.hpp"
#include "command_line.hpp"
#include "core/check.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "files/manifest.hpp"
#include "files/retry.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace qlorapp::cli {
namespace {

/// They would make the compared runs others.
constexpr std::array<std::string_view, 8> kSetHere{"max_steps",     "output",     "output_dir",       "resume_from_checkpoint",
                                                   "save_strategy", "save_steps", "save_total_limit", "overwrite_output_dir"};

/// "--max-steps=5" is "max_steps".
std::string name_of(std::string_view argument) {
  argument.remove_prefix(2);
  std::string name(argument.substr(0, argument.find('=')));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::string tail(const std::string& path) {
  constexpr int64_t kMost = 600;
  const files::FileReader file(path);
  const int64_t size = std::min(kMost, file.size());
  std::string text(static_cast<size_t>(size), '\0');
  file.read_at(file.size() - size, std::as_writable_bytes(std::span(text)));
  return text;
}

/// `qlorapp train` in a process of its own. @throws Error with the end of its output unless it succeeds.
void train_fresh(const Arguments& options, const std::string& log) {
  std::vector<std::string> words{"qlorapp", "train"};
  words.insert(words.end(), options.begin(), options.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const int failed = ::posix_spawn(&child, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) throw IoError(message("[verify-resume] cannot start qlorapp train: {}.", std::strerror(failed)), failed);
  int status = 0;
  (void)files::retrying([&] { return ::waitpid(child, &status, 0); });
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw Error(message("[verify-resume] qlorapp train failed:\n{}", tail(log)));
}

/// Files that differ between two checkpoints. trainer_state.json and training_args.json name folders, times and speeds.
std::vector<std::string> differences(const std::string& a, const std::string& b) {
  const files::Manifest first = files::read_manifest(a), second = files::read_manifest(b);
  std::vector<std::string> names;
  for (const files::ManifestFile& file : first.files) {
    if (file.name == "trainer_state.json" || file.name == "training_args.json") continue;
    const auto is_it = [&](const files::ManifestFile& other) { return other.name == file.name && other.sha256 == file.sha256; };
    if (std::none_of(second.files.begin(), second.files.end(), is_it)) names.push_back(file.name);
  }
  return names;
}

}  // namespace

int verify_resume(const Arguments& arguments) {
  std::string output;
  int64_t steps = 6;
  CommandLine line(
      "verify-resume", "--output DIR TRAIN-OPTIONS",
      "Trains for a few steps, resumes from each checkpoint in a fresh process, and compares the results byte by byte. All other "
      "options are those of qlorapp train.");
  line.option("output", output, "new or empty folder for the runs; it is removed at the end", true);
  line.option("steps", steps, "optimizer steps");
  Arguments own, others;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_name = arguments[i].starts_with("--");
    const std::string name = is_name ? name_of(arguments[i]) : std::string();
    const bool is_own = name == "output" || name == "steps" || name == "help" || arguments[i] == "-h";
    QLORAPP_CHECK_VALUE(is_own || !is_name || std::find(kSetHere.begin(), kSetHere.end(), name) == kSetHere.end(),
                        "[verify-resume] --{} is set by this command. Leave it out.", name);
    Arguments& to = is_own ? own : others;
    to.push_back(arguments[i]);
    if (is_own && name != "help" && arguments[i].find('=') == std::string::npos && i + 1 < arguments.size())
      to.push_back(arguments[++i]);
  }
  line.parse(own);
  QLORAPP_CHECK_VALUE(steps >= 2, "[verify-resume] --steps must be an integer >= 2; got {}.", steps);

  const files::FreshFolder scratch(output);
  const std::string& folder = scratch.path();
  const std::string log = files::path_in(folder, "log.txt");
  const auto run = [&](const std::string& name, int64_t resumed) {
    const std::string to = files::path_in(folder, name);
    Arguments options = others;
    for (const std::string& word :
         {std::string("--output"), to, std::string("--max_steps"), message("{}", steps), std::string("--save_strategy"),
          std::string("steps"), std::string("--save_steps"), std::string("1")})
      options.push_back(word);
    if (resumed > 0) {
      options.emplace_back("--resume_from_checkpoint");
      options.push_back(files::path_in(folder, message("whole/checkpoint-{}", resumed)));
    }
    train_fresh(options, log);
    return files::path_in(to, message("checkpoint-{}", steps));
  };
  const std::string whole = run("whole", 0);
  int64_t failed = 0;
  for (int64_t step = 1; step < steps; ++step) {
    const std::string name = message("from-{}", step);
    const std::vector<std::string> different = differences(whole, run(name, step));
    files::remove_folder(files::path_in(folder, name));
    failed += different.empty() ? 0 : 1;
    std::printf("resumed after step %lld: %s\n", static_cast<long long>(step),
                different.empty() ? "identical" : ("different: " + joined(different)).c_str());
    std::fflush(stdout);
  }
  if (failed == 0) {
    std::printf("all %lld resumed runs are identical to the run that was not interrupted, byte by byte\n",
                static_cast<long long>(steps - 1));
  } else {
    std::printf("%lld of %lld resumed runs differ. On a GPU results repeat with --full_determinism true only.\n",
                static_cast<long long>(failed), static_cast<long long>(steps - 1));
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace qlorapp::cli
