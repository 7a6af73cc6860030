// SPDX-License-Identifier: Apache-2.0
/// The errors of the library: one family, so that `catch (const qlorapp::Error&)` catches every one that the library throws.
///
/// Grammar of a message: `[where] rule; got value. What to do.` — `where`: an operator, a file, an option or a key.
/// Arguments are checked once, where they enter. The library never prints an error and never exits.
///
/// Errors of torch itself keep their type: a failed allocation inside torch is c10::OutOfMemoryError.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

namespace qlorapp {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's mistake: a value outside its range, an unknown option. Python: ValueError. Command line: exit code 2.
class ValueError : public Error {
 public:
  using Error::Error;
};

/// The caller's mistake: an object of the wrong kind. Python: TypeError. Command line: exit code 2.
class TypeError : public Error {
 public:
  using Error::Error;
};

/// A file that breaks its format: truncated, hostile, or of another kind. The message names the file.
/// Python: qlorapp.FormatError, a ValueError. Command line: exit code 2.
class FormatError : public Error {
 public:
  using Error::Error;
};

/// The operating system refused: no such file, no space, no permission. Python: OSError. Command line: exit code 2.
class IoError : public Error {
 public:
  IoError(const std::string& message, int error_number) : Error(message), errno_(error_number) {}
  /// As errno had it.
  [[nodiscard]] int error_number() const noexcept { return errno_; }

 private:
  int errno_;
};

/// A device has not enough memory for the work. Python: torch.OutOfMemoryError. Command line: exit code 1.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// The first line of an error's message: torch appends a backtrace on the lines below.
[[nodiscard]] inline std::string first_line(const std::exception& error) {
  const std::string_view text = error.what();
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace qlorapp
