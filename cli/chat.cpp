// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <utility>

#include "answering_model.hpp"
#include "command.hpp"
#include "core/check.hpp"
#include "generation_options.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/data/prompts.hpp"
#include "stop_signals.hpp"
#include "text/unicode.hpp"

namespace qlorapp::cli {
namespace {

constexpr std::string_view kHelp =
    "/reset       a new conversation\n"
    "/regenerate  another answer to your last message\n"
    "/adapter     the adapters that are loaded; /adapter NAME, /adapter none\n"
    "/system TEXT a system message, in a new conversation\n"
    "//TEXT       a message that begins with a slash\n"
    "/quit        as Ctrl-D. Ctrl-C stops an answer.\n";

/// Bytes of a line that a terminal passes on; the rest of a longer one is lost on the way (termios, canonical input).
constexpr size_t kTerminalLine = 4095;

/// A conversation, and the model that answers.
class Session {
 public:
  Session(CausalLM& model, FolderText& tools, GenerationOptions options, std::string system)
      : model_(model),
        tools_(tools),
        options_(std::move(options)),
        system_(std::move(system)),
        stops_(options_.stops(tools)),
        terminal_(::isatty(STDOUT_FILENO) == 1) {
    reset();
  }

  void run() {
    for (std::string line; read(line);) {
      if (line.ends_with('\r')) line.pop_back();
      if (line.starts_with("//")) {
        line.erase(0, 1);
      } else if (line.starts_with('/')) {
        if (!obey(line)) break;
        continue;
      }
      if (line.find_first_not_of(" \t") != std::string::npos) {
        messages_.push_back({"user", line});
        answer();
      }
    }
    for (const std::string& stop : stops_.unmatched()) print_line(stderr, stop);
  }

 private:
  void reset() {
    messages_.clear();
    if (!system_.empty()) messages_.push_back({"system", system_});
  }

  /// @returns false at the end.
  bool read(std::string& line) {
    const bool typed = ::isatty(STDIN_FILENO) == 1, asks = terminal_ && typed;
    for (;;) {
      for (; asks; std::fputs("\n", stdout)) {  // Ctrl-C instead of a line: the session stays
        StopSignals::forget();
        std::fputs("> ", stdout);
        std::fflush(stdout);
        if (noted_.await_input()) break;
      }
      if (!std::getline(std::cin, line)) return false;
      if (!typed || line.size() < kTerminalLine) return true;
      print_line(stdout,
                 message("not taken: a terminal passes on the first {} bytes of a line, and the rest of yours is lost. Give longer "
                         "messages by a pipe: qlorapp chat … < FILE",
                         kTerminalLine));
    }
  }

  bool obey(const std::string& line) {
    const size_t space = std::min(line.find(' '), line.size());
    const std::string word = line.substr(0, space), rest = line.substr(std::min(space + 1, line.size()));
    if (word == "/quit" || word == "/exit") return false;
    if (word == "/reset") {
      reset();
    } else if (word == "/system") {
      begin_with(rest);
    } else if (word == "/regenerate") {
      regenerate();
    } else if (word == "/adapter") {
      choose(rest);
    } else {
      if (word != "/help") print_line(stdout, message("there is no word '{}':", word));
      std::fwrite(kHelp.data(), 1, kHelp.size(), stdout);
    }
    std::fflush(stdout);
    return true;
  }

  void begin_with(const std::string& system) {
    if (const size_t bad = unicode::first_invalid_utf8(system); bad != std::string_view::npos) {
      print_line(stdout, message("not taken: byte {} of the message is no UTF-8", bad));
      return;
    }
    system_ = system;
    reset();
  }

  void regenerate() {
    std::string before;
    if (!messages_.empty() && messages_.back().role == "assistant") {
      before = messages_.back().content;
      messages_.pop_back();
    }
    if (messages_.empty() || messages_.back().role != "user") {
      print_line(stdout, "there is no message to answer");
      return;
    }
    ++options_.generate.sampling.seed;
    answer();
    if (!options_.generate.sampling.do_sample && StopSignals::received() == 0 && !messages_.empty() &&
        messages_.back().content == before)
      print_line(stderr, "answers are greedy, so this one is the same: begin with --temperature 0.7 for others");
  }

  void choose(const std::string& name) {
    AdapterRegistry& adapters = model_.adapters();
    const std::vector<std::string> names = adapters.names();
    if (name == "none") {
      adapters.enable(false);
    } else if (!name.empty()) {
      if (std::ranges::find(names, name) == names.end()) {
        print_line(stdout, message("there is no adapter '{}'", name));
        return;
      }
      adapters.activate(name);
      adapters.enable(true);
    }
    print_line(stdout, message("adapters: {}; answers: {}", names.empty() ? "none" : joined(names),
                               adapters.in_use() ? adapters.active_name() : std::string("the base")));
  }

  void answer() {
    std::vector<TokenId> tokens;
    try {
      tokens = ids_of_conversation(messages_, tools_);
    } catch (const Error& error) {  // bytes that are no text, or a template that wants other messages: the session stays
      print_line(stdout, message("not answered: {}", first_line(error)));
      messages_.pop_back();
      return;
    }
    const std::vector<int64_t> ids(tokens.begin(), tokens.end());
    const int64_t positions = position_limit(model_.config());
    if (std::ssize(ids) >= positions) {
      const bool alone = messages_.size() == (system_.empty() ? 1U : 2U);
      print_line(stdout,
                 message("the {} {} tokens, and the model {} positions: {}", alone ? "message alone has" : "conversation has",
                         ids.size(), positions, alone ? "shorten it" : "/reset begins a new one"));
      messages_.pop_back();
      return;
    }
    GenerateOptions options = options_.generate;
    options.fits_positions = true;
    const int64_t number = answers_++;
    stops_.begin(number, tokens);
    GrowingText shown(tools_, [&](std::string_view piece) { show(piece, terminal_); });
    StopSignals::forget();
    options.on_token = [&](int64_t, int64_t token) {
      shown.add(token);
      return !stops_.add(number, static_cast<TokenId>(token)) && StopSignals::received() == 0;
    };
    const auto began = std::chrono::steady_clock::now();
    const std::vector<int64_t> added = generate(model_, ids, options);
    shown.finish();
    std::fputs("\n", stdout);
    std::fflush(stdout);
    const bool stopped = StopSignals::received() != 0;
    const bool cut = !stopped && !ended(options, stops_, number, added),
               full = cut && std::ssize(ids) + std::ssize(added) >= positions;
    if (terminal_)
      print_line(stderr, message("[{}{}]", speed_text(shown.tokens(), began),
                                 stopped        ? ", stopped"
                                 : cut && !full ? ", cut at max_new_tokens"
                                                : ""));
    if (full)
      print_line(stderr,
                 message("the answer was cut: the model's {} positions are full. /reset begins a new conversation", positions));
    messages_.push_back({"assistant", shown.text()});
  }

  const StopSignals noted_{{SIGINT}, StopSignals::Second::kIsNoted};
  CausalLM& model_;
  FolderText& tools_;
  GenerationOptions options_;
  std::string system_;
  StopStrings stops_;
  int64_t answers_ = 0;
  bool terminal_;
  std::vector<Message> messages_;
};

}  // namespace

int chat(const Arguments& arguments) {
  ModelOptions model_options;
  GenerationOptions options;
  options.generate.max_new_tokens = 1024;
  std::vector<std::string> adapters;
  std::string system;
  CommandLine line(
      "chat", "--model DIR [--adapter DIR[,DIR…]]",
      "A conversation in the terminal: a line is a message, and the answer appears as it grows. /help lists the words that\n"
      "begin with a slash. From a pipe each line is a message, too.");
  model_options.add_loading_to(line);
  model_options.add_template_to(line);
  line.option("adapter", adapters,
              "PEFT adapter folders; the first answers, /adapter NAME chooses another by its folder's name (/adapter lists them)");
  line.option("system", system, "system message");
  options.add_to(line);
  line.group("Model", {"model", "adapter", "device", "dtype", "quant_type", "double_quant", "block_size", "load_in_4bit"});
  line.group("Text", {"system", "chat_template", "max_new_tokens", "min_new_tokens", "stop_strings"});
  GenerationOptions::group(line);
  line.parse(arguments);
  AnsweringModel answering(model_options, options, line, std::move(adapters));
  answering.tools().require_tokenizer("chat");
  answering.tools().require_template("chat");
  CausalLM model = answering.load(options, /*chat=*/true);
  Session(model, answering.tools(), std::move(options), std::move(system)).run();
  return 0;
}

}  // namespace qlorapp::cli
