// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/core/log.hpp"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/escaped.hpp"

namespace qlorapp {
namespace {

LogSink& sink() {
  static LogSink current = [](LogLevel level, std::string_view line) {
    if (level == LogLevel::kDebug) return;
    std::fprintf(stderr, "%s%.*s\n", level == LogLevel::kWarning ? "warning: " : "", static_cast<int>(line.size()), line.data());
  };
  return current;
}

void say(LogLevel level, std::string_view line) {
  if (sink()) sink()(level, level == LogLevel::kWarning ? escaped_line(line) : escaped(line));
}

}  // namespace

void set_log_sink(LogSink replacement) { sink() = std::move(replacement); }

void log_debug(std::string_view line) { say(LogLevel::kDebug, line); }

void log_info(std::string_view line) { say(LogLevel::kInfo, line); }

void log_warning(std::string_view line) { say(LogLevel::kWarning, line); }

void log_warning_once(std::string_view line) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> said;
  {
    const std::lock_guard lock(mutex);
    if (!said.emplace(line).second) return;
  }
  log_warning(line);
}

}  // namespace qlorapp
