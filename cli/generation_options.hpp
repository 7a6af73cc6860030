// SPDX-License-Identifier: Apache-2.0
/// For `generate` and `chat`: the options of sampling, the tokens that end an answer, its text while it grows, and Ctrl-C.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "command_line.hpp"
#include "folder_text.hpp"
#include "qlorapp/nn/generate.hpp"

namespace qlorapp::cli {

struct GenerationOptions {
  GenerateOptions generate;
  int64_t seed = 42;

  void add_to(CommandLine& line);
  /// Their group in the help, at its place among the command's own.
  static void group(CommandLine& line);
  /// After parse(). @throws ValueError for a seed or an option of sampling out of range.
  void settle(const CommandLine& line);
  /// The tokens that end an answer of this model. @param chat  whether its template is applied.
  void add_ends(const CausalLM& model, FolderText& tools, bool chat);
};

/// Gives out an answer's text while it grows, whole characters only.
class GrowingText {
 public:
  /// @param out  gets each piece.
  GrowingText(FolderText& tools, std::function<void(std::string_view)> out) : tools_(tools), out_(std::move(out)) {}

  void add(int64_t token);
  /// Gives out the rest. Its last character may be incomplete.
  void finish();
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] int64_t tokens() const { return static_cast<int64_t>(ids_.size()); }

 private:
  void give(bool all);

  FolderText& tools_;
  std::function<void(std::string_view)> out_;
  std::vector<TokenId> ids_;
  size_t shown_ = 0, window_ = 0;  ///< Tokens whose text was given out; where what is decoded together begins.
  std::string text_;
};

/// While it lives Ctrl-C is noted. One at a time.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  [[nodiscard]] static bool came();
  static void forget();
  /// Waits until there is something to read from standard input, a terminal. @returns false if Ctrl-C came first.
  [[nodiscard]] bool await_input() const;

 private:
  struct sigaction before_ {};
  /// The end of a pipe to which the handler writes. So a signal just before the wait is not lost, in whichever thread it arrives.
  int reads_ = -1;
};

/// Writes a part of an answer to stdout. A terminal would obey control characters, so it gets them escaped.
void show(std::string_view text, bool is_terminal);

/// "340 tokens, 106.2 tokens/s".
[[nodiscard]] std::string speed_text(int64_t tokens, std::chrono::steady_clock::time_point began);

}  // namespace qlorapp::cli
