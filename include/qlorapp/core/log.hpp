// SPDX-License-Identifier: Apache-2.0
/// Where the library says things. It never writes to a stream by itself: a program installs a sink.
#pragma once

#include <functional>
#include <string_view>

namespace qlorapp {

enum class LogLevel { kDebug, kInfo, kWarning };

/// Receives one line without a newline at its end; a sample of the data may have some inside. Control characters are escaped (\x1b), because
/// a line may quote a file. May be called from the thread that trains; must not throw.
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Replaces the sink; an empty one discards. The default writes to stderr, all but kDebug, so that a program that installs none
/// still sees warnings. Not for use while another thread logs.
void set_log_sink(LogSink sink);

/// One line to the sink, if its level is shown.
void log_debug(std::string_view line);
void log_info(std::string_view line);
void log_warning(std::string_view line);

/// As log_warning, but logs each distinct line once per process.
void log_warning_once(std::string_view line);

}  // namespace qlorapp
