// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/inspect.hpp"

#include <algorithm>
#include <cstdio>

#include "command.hpp"
#include "command_line.hpp"

namespace qlorapp::cli {

int inspect(const Arguments& arguments) {
  std::string path;
  CommandLine line("inspect", "PATH", "Verifies a checkpoint, adapter or model folder, and prints its kind and any damage.");
  line.option("path", path, "the folder", true);
  // The one thing that it needs may stand alone.
  Arguments named = arguments;
  if (!named.empty() && !named.front().starts_with('-')) named.insert(named.begin(), "--path");
  line.parse(named);
  const Inspection found = qlorapp::inspect(path);
  std::printf("%s: %s, %s\n", path.c_str(), found.kind.c_str(), found.damage.empty() ? "whole" : "DAMAGED");
  size_t width = 0;
  for (const auto& [name, value] : found.facts) width = std::max(width, name.size());
  for (const auto& [name, value] : found.facts) std::printf("  %-*s  %s\n", static_cast<int>(width), name.c_str(), value.c_str());
  for (const std::string& each : found.loads_in) std::printf("  loads in: %s\n", each.c_str());
  for (const std::string& each : found.damage) std::printf("  damaged: %s\n", each.c_str());
  return found.damage.empty() ? 0 : 1;
}

}  // namespace qlorapp::cli
