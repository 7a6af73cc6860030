// SPDX-License-Identifier: Apache-2.0
/// The commands of the program. Each parses its own options and returns an exit code; errors are thrown.
#pragma once

#include <string>
#include <vector>

namespace qlorapp::cli {

using Arguments = std::vector<std::string>;

/// Exit code of a plan whose run does not fit; 2 is a command that was not carried out, 1 any other failure.
inline constexpr int kDoesNotFit = 3;

int train(const Arguments& arguments);
int plan(const Arguments& arguments);
int quantize(const Arguments& arguments);
int merge(const Arguments& arguments);
int eval(const Arguments& arguments);
int generate(const Arguments& arguments);
int inspect(const Arguments& arguments);
int verify_resume(const Arguments& arguments);

}  // namespace qlorapp::cli
