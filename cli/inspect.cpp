// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/inspect.hpp"

#include <algorithm>
#include <cstdio>

#include "command.hpp"
#include "command_line.hpp"
#include "progress.hpp"

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
  print_line(stdout, message("{}: {}, {}", path, found.kind,
                             !found.damage.empty() ? "DAMAGED"
                             : found.is_verified   ? "whole"
                                                   : "no damage found, not verifiable"));
  size_t width = 0;
  for (const auto& [name, value] : found.facts) width = std::max(width, name.size());
  for (const auto& [name, value] : found.facts)
    print_line(stdout, message("  {}{}  {}", name, std::string(width - name.size(), ' '), value));
  for (const std::string& each : found.loads_in) print_line(stdout, message("  loads in: {}", each));
  for (const std::string& each : found.damage) print_line(stdout, message("  damaged: {}", each));
  return found.damage.empty() ? 0 : 1;
}

}  // namespace qlorapp::cli
