// SPDX-License-Identifier: Apache-2.0
/// The commands of the program. Each parses its own options and returns an exit code; errors are thrown.
#pragma once

#include <string>
#include <vector>

#include "qlorapp/core/error.hpp"

namespace qlorapp {
struct ExportVerification;
}

namespace qlorapp::cli {

using Arguments = std::vector<std::string>;

/// Exit code of a plan whose run does not fit; 2 is a command that was not carried out, 1 any other failure.
inline constexpr int kDoesNotFit = 3;
/// Of a run that the system stopped after steps, with a checkpoint to go on from.
inline constexpr int kCanGoOn = 4;

/// The error of a run that has trained steps, and the exit code: not 2, which means that nothing was done.
class BegunRunFailed : public Error {
 public:
  BegunRunFailed(const std::string& message, int code) : Error(message), code_(code) {}
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

int train(const Arguments& arguments);
int init_config(const Arguments& arguments);
int plan(const Arguments& arguments);
int quantize(const Arguments& arguments);
int merge(const Arguments& arguments);
int export_to(const Arguments& arguments);
int eval(const Arguments& arguments);
int generate(const Arguments& arguments);
int chat(const Arguments& arguments);
int inspect(const Arguments& arguments);
int verify_resume(const Arguments& arguments);
int verify_export(const Arguments& arguments);

/// Prints the table of a comparison.
void print_verification(const ExportVerification& found);

}  // namespace qlorapp::cli
