// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "command.hpp"
#include "command_line.hpp"
#include "core/check.hpp"
#include "core/escaped.hpp"
#include "core/nearest_name.hpp"
#include "ops/device_memory.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"

namespace {

struct Command {
  std::string_view name;
  std::string_view summary;
  int (*run)(const qlorapp::cli::Arguments&);
};

constexpr Command kCommands[] = {
    {"train", "fine-tune low-rank adapters on a 4-bit base", qlorapp::cli::train},
    {"eval", "compute loss and exact matches on held-out rows", qlorapp::cli::eval},
    {"generate", "continue a prompt", qlorapp::cli::generate},
    {"chat", "talk with a model in the terminal", qlorapp::cli::chat},
    {"plan", "estimate memory and time of a run without loading the model", qlorapp::cli::plan},
    {"quantize", "write a bitsandbytes 4-bit checkpoint", qlorapp::cli::quantize},
    {"merge", "write base and adapter as one 16-bit checkpoint", qlorapp::cli::merge},
    {"export", "write a model or adapter for llama.cpp, Ollama and LM Studio", qlorapp::cli::export_to},
    {"inspect", "verify a checkpoint, adapter or model folder", qlorapp::cli::inspect},
    {"verify-resume", "show that resumed runs equal the run that was not interrupted", qlorapp::cli::verify_resume},
    {"init-config", "write a commented YAML file of train's options", qlorapp::cli::init_config},
    {"verify-export", "compare exported forms with the trained model", qlorapp::cli::verify_export},
};

void print_usage(std::FILE* to) {
  std::fprintf(to, "usage: qlorapp COMMAND [options]     qlorapp COMMAND --help\n\n");
  for (const Command& command : kCommands) {
    std::fprintf(to, "  %-13s %s\n", std::string(command.name).c_str(), std::string(command.summary).c_str());
  }
  std::fprintf(
      to,
      "\nexit code: 0 done; 1 failed; 2 refused, nothing was done; 3 plan: the run does not fit; 4 train: the system stopped the "
      "run\n(a full disk), and --resume_from_checkpoint true goes on; 128 + signal: stopped, with a checkpoint\n");
}

int report(std::string_view error, int code) {
  error = error.substr(0, error.find("\nException raised from"));  // without torch's backtrace
  qlorapp::cli::print_line(stderr, "error: " + qlorapp::escaped_line(error));
  return code;
}

/// One line for the user: what is wrong and what to do. Exit code 2: the command was not carried out because of what it was
/// given.
int refuse(std::string_view message) { return report(message, 2); }

/// A result that did not reach its reader is none.
int with_output_checked(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  const int error = errno;
  const int failed = report(
      qlorapp::message("[stdout] cannot be written{}. Lines of the output are lost; files that the command names are written.",
                       error == 0 ? "" : qlorapp::message(": {}", std::strerror(error))),
      1);
  return code == 0 ? failed : code;
}

/// Without one of the three streams, the next file that is opened would get its number, and the lines that are printed. Reading from stdin
/// and writing to stdout and stderr then fails.
void open_standard_streams() {
  for (int stream = 0; stream < 3; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0) (void)::open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);
  }
}

/// The work went wrong on its way: exit code 1.
int fail(const std::exception& error) {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text = of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
  const bool is_ours = dynamic_cast<const qlorapp::Error*>(&error) != nullptr;
  if (!is_ours && qlorapp::ops::is_out_of_memory(error)) {
    std::fprintf(
        stderr,
        "error: [memory] this process cannot have more memory (%s). End other programs, raise its limit (ulimit -v), or give "
        "--memory_budget auto or a smaller --per_device_train_batch_size.\n",
        qlorapp::first_line(error).c_str());
  } else {
    qlorapp::cli::print_line(stderr, "error: " + text);
  }
  return 1;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    print_usage(stderr);
    return 2;
  }
  if (arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
    print_usage(stdout);
    return 0;
  }
  if (arguments[0] == "--version") {
    std::printf("qlorapp %s\n", QLORAPP_VERSION);
    return 0;
  }
  std::vector<std::string_view> known;
  for (const Command& command : kCommands) {
    if (command.name == arguments[0]) return command.run({arguments.begin() + 1, arguments.end()});
    known.push_back(command.name);
  }
  return refuse(qlorapp::message("there is no command '{}'.{} See qlorapp --help.", arguments[0],
                                 qlorapp::did_you_mean(arguments[0], known)));
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  qlorapp::set_log_sink([](qlorapp::LogLevel level, std::string_view line) {
    if (level == qlorapp::LogLevel::kDebug) return;
    if (level == qlorapp::LogLevel::kWarning) {
      qlorapp::cli::print_line(stderr, qlorapp::message("warning: {}", line));
    } else {
      qlorapp::cli::print_line(stdout, line);
    }
  });
  try {
    return with_output_checked(run({argv + 1, argv + argc}));
  } catch (const qlorapp::cli::HelpShown&) { return with_output_checked(0); } catch (const qlorapp::cli::BegunRunFailed& error) {
    return report(error.what(), error.code());
  } catch (const qlorapp::ValueError& error) { return refuse(error.what()); } catch (const qlorapp::TypeError& error) {
    return refuse(error.what());
  } catch (const qlorapp::FormatError& error) { return refuse(error.what()); } catch (const qlorapp::IoError& error) {
    return refuse(error.what());
  } catch (const std::exception& error) { return fail(error); }
}
