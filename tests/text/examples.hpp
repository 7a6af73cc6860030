// SPDX-License-Identifier: Apache-2.0
/// The files of examples/data.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>

/// @returns the path of a file or folder in examples/data, from any working directory.
inline std::string example_file(const std::string& name) {
  namespace fs = std::filesystem;
  // A cached object file may hold a relative __FILE__. The program lies in a build folder, of the repository or elsewhere; ctest starts it in
  // the repository.
  for (fs::path from : {fs::path(__FILE__), fs::canonical("/proc/self/exe"), fs::current_path() / "."}) {
    while (from.has_relative_path()) {
      from = from.parent_path();
      if (fs::exists(from / "examples/data" / name)) return (from / "examples/data" / name).string();
    }
  }
  throw std::runtime_error("examples/data/" + name + " is not there");
}
