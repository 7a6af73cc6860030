// SPDX-License-Identifier: Apache-2.0
/// A script of the Python package, at work for the command. Not thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace qlorapp::cli {

/// The path of a script beside the text service, or of that itself (""). `python -m qlorapp` sets QLORAPP_PYTHON and QLORAPP_HF_TEXT;
/// without them it is empty.
[[nodiscard]] std::string service_script(std::string_view file);

/// An environment variable. @throws ValueError unless it is a number above 0.
[[nodiscard]] double seconds_of(const char* variable, double otherwise);

/// The process. Its standard input is a socket, on which it may answer; its standard output is the command's standard error.
class PythonService {
 public:
  /// @param subject  the messages' first word.  @param words  behind the interpreter: the script and its arguments.
  /// @throws IoError if it cannot be started.
  PythonService(std::string_view subject, std::vector<std::string> words);
  /// Ends its input, and waits for its end.
  ~PythonService();
  PythonService(const PythonService&) = delete;
  PythonService& operator=(const PythonService&) = delete;

  [[nodiscard]] int socket() const { return socket_; }  ///< -1 behind end_input().
  [[nodiscard]] double cpu_seconds() const;
  /// @returns false, with errno set, where it takes nothing more.
  [[nodiscard]] bool send_all(std::string_view text) const;
  void end_input();
  /// Of the input. Whether the process has ended by then.
  [[nodiscard]] bool ends_within(double seconds);
  void stop(int signal) const;

 private:
  pid_t process_ = 0;  ///< 0: it has ended, and was waited for.
  int socket_ = -1;
};

}  // namespace qlorapp::cli
