// SPDX-License-Identifier: Apache-2.0
/// For `generate` and `chat`: the options of sampling, the tokens and texts that end an answer, and its text while it grows.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "command_line.hpp"
#include "folder_text.hpp"
#include "qlorapp/nn/generate.hpp"
#include "qlorapp/text/stop_strings.hpp"

namespace qlorapp::cli {

struct GenerationOptions {
  GenerateOptions generate;
  std::vector<std::string> stop_strings;
  int64_t seed = 42;

  void add_to(CommandLine& line);
  /// Their group in the help, at its place among the command's own.
  static void group(CommandLine& line);
  /// After parse(). @throws ValueError for a seed, an option of sampling or a stop string that cannot be.
  void settle(const CommandLine& line);
  /// @param tools  has a tokenizer.
  [[nodiscard]] StopStrings stops(FolderText& tools) const;
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

/// Writes a part of an answer to stdout. A terminal would obey control characters, so it gets them escaped.
void show(std::string_view text, bool is_terminal);

/// Whether an answer ended by itself: by a stop string or a token that ends; else something cut it.
[[nodiscard]] bool ended(const GenerateOptions& options, const StopStrings& stops, int64_t row, std::span<const int64_t> tokens);

/// "340 tokens, 106.2 tokens/s".
[[nodiscard]] std::string speed_text(int64_t tokens, std::chrono::steady_clock::time_point began);

}  // namespace qlorapp::cli
