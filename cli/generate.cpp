// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <utility>

#include "command.hpp"
#include "core/check.hpp"
#include "files/growing_file.hpp"
#include "generation_options.hpp"
#include "hub.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/prompts.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/memory/gpu_table.hpp"
#include "text/unicode.hpp"

namespace qlorapp::cli {
namespace {

/// Ctrl-C, on its way out of the generation.
struct Stopped {};

/// The answer appears while it grows.
void answer_one(CausalLM& model, FolderText& tools, const Prompt& prompt, GenerateOptions options) {
  const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  GrowingText shown(tools, [&](std::string_view piece) { show(piece, is_terminal); });
  options.on_token = [&](int64_t, int64_t token) {
    shown.add(token);
    return true;
  };
  const auto began = std::chrono::steady_clock::now();
  static_cast<void>(generate(model, std::vector<int64_t>(prompt.ids.begin(), prompt.ids.end()), options));
  shown.finish();
  std::fputc('\n', stdout);
  std::fflush(stdout);
  if (is_terminal) print_line(stderr, message("[{}]", speed_text(shown.tokens(), began)));
}

/// Answers in the order of their prompts, one JSON object a line.
class AnswerLines {
 public:
  AnswerLines(const std::vector<Prompt>& prompts, FolderText& tools, files::GrowingFile* file)
      : prompts_(prompts), tools_(tools), file_(file), waiting_(prompts.size()) {}

  void add(int64_t row, std::span<const int64_t> tokens, const std::vector<int64_t>& ends) {
    const Prompt& prompt = prompts_[static_cast<size_t>(row)];
    const std::string text = tools_.decode(std::vector<TokenId>(tokens.begin(), tokens.end()), /*skip_special_tokens=*/true);
    const bool stopped = !tokens.empty() && std::ranges::find(ends, tokens.back()) != ends.end();
    format::Json line;
    line["prompt"] = format::Json::parse(prompt.text);
    line["text"] = text;
    line["finish_reason"] = stopped ? "stop" : "length";
    line["prompt_tokens"] = prompt.ids.size();
    line["tokens"] = tokens.size();
    if (!prompt.answer.empty()) {
      const bool exact = unicode::strip(text) == unicode::strip(prompt.answer);
      line["answer"] = prompt.answer;
      line["exact_match"] = exact;
      ++answered_;
      exact_ += exact ? 1 : 0;
    }
    tokens_ += std::ssize(tokens);
    waiting_[static_cast<size_t>(row)] = line.dump(-1, ' ', false, format::Json::error_handler_t::replace) + "\n";
    for (; next_ < waiting_.size() && !waiting_[next_].empty(); ++next_) write(std::exchange(waiting_[next_], {}));
  }

  [[nodiscard]] int64_t written() const { return static_cast<int64_t>(next_); }
  [[nodiscard]] std::string summary(std::chrono::steady_clock::time_point began) const {
    std::string text = message("{} of {} prompts, {}", next_, prompts_.size(), speed_text(tokens_, began));
    if (answered_ > 0) text += message(", exact_match {} of {}", exact_, answered_);
    return text;
  }

 private:
  void write(const std::string& line) {
    if (file_ != nullptr) return file_->append(line);
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  }

  const std::vector<Prompt>& prompts_;
  FolderText& tools_;
  files::GrowingFile* file_;
  std::vector<std::string> waiting_;  ///< Lines whose turn has not come.
  size_t next_ = 0;                   ///< The first line that is not written.
  int64_t tokens_ = 0, answered_ = 0, exact_ = 0;
};

int answer_all(CausalLM& model, FolderText& tools, const std::vector<Prompt>& prompts, GenerateOptions options,
               files::GrowingFile* file) {
  AnswerLines lines(prompts, tools, file);
  ProgressBar bar("generating");
  std::vector<std::vector<int64_t>> ids;
  for (const Prompt& prompt : prompts) ids.emplace_back(prompt.ids.begin(), prompt.ids.end());
  int64_t done = 0;
  options.on_token = [](int64_t, int64_t) { return Interrupts::came() ? throw Stopped() : true; };
  options.on_end = [&](int64_t row, std::span<const int64_t> tokens) {
    lines.add(row, tokens, options.eos_token_ids);
    if (file != nullptr) bar.update(++done, std::ssize(prompts));
  };
  const auto began = std::chrono::steady_clock::now();
  const Interrupts noted;
  bool stopped = false;
  try {
    static_cast<void>(generate(model, ids, options));
  } catch (const Stopped&) { stopped = true; }
  print_line(stderr, message("{}{}{}", stopped ? "stopped: " : "", lines.summary(began),
                             file != nullptr ? message(": {}", file->path()) : std::string()));
  return stopped ? 128 + SIGINT : 0;
}

}  // namespace

int generate(const Arguments& arguments) {
  ModelOptions model_options;
  std::string prompt, data, adapter, output_file, cache_memory;
  PromptOptions prompts_are;
  RowOptions row_options;
  GenerationOptions options;
  CommandLine line(
      "generate", "--model DIR --prompt TEXT [--adapter DIR]",
      "Continues a prompt, or those of --data; greedy unless an option of sampling is given. With a chat template the\n"
      "prompt is a user turn. Prompts of a file or a pipe give one JSON object a line.");
  model_options.add_loading_to(line);
  model_options.add_template_to(line);
  line.option("prompt", prompt, "text to continue");
  line.option("data", data, "prompts: FILE[,FILE …], in the formats of train, or with prompts alone; -: standard input");
  row_options.add_to(line);
  line.option("output_file", output_file, "a new file for the answers, JSON lines; unset: standard output");
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("system", prompts_are.system, "system message; requires a chat template");
  line.option("raw", prompts_are.raw, "do not apply the chat template");
  options.add_to(line);
  line.option("max_rows", options.generate.max_rows, "prompts that are computed at once, at most");
  line.option("cache_memory", cache_memory, "of keys and values, at most, as 4GB; unset: what is free of a GPU");
  line.group("Model", {"model", "adapter", "device", "dtype", "quant_type", "double_quant", "block_size", "load_in_4bit"});
  line.group("Text", {"prompt", "system", "chat_template", "raw", "max_new_tokens", "min_new_tokens"});
  line.group("Several prompts", {"data", "data_format", "dataset_text_field", "prompt_column", "completion_column",
                                 "messages_column", "output_file", "max_rows", "cache_memory"});
  GenerationOptions::group(line);
  line.parse(arguments);
  row_options.apply_to(prompts_are.rows);
  const bool one = line.given("prompt");
  QLORAPP_CHECK_VALUE(!one || data.empty(), "[generate] the prompts must come from --prompt or --data; got both. Leave one out.");
  if (!one && data.empty() && ::isatty(STDIN_FILENO) != 1) data = "-";
  QLORAPP_CHECK_VALUE(one || !data.empty(),
                      "[generate] there must be a prompt: give --prompt TEXT, --data FILE, or text through a pipe.");
  QLORAPP_CHECK_VALUE(!one || output_file.empty(),
                      "[output_file] is for the prompts of --data; --prompt writes to standard output.");
  if (!cache_memory.empty()) options.generate.cache_bytes = parse_bytes("cache_memory", cache_memory).count;
  model_options.open();
  options.settle(line);
  const format::ModelConfig config = model_options.config();
  const ComputeDtype computed = model_options.choose_dtype(config);
  check_adapter_folder("adapter", adapter);
  if (computed.is_substitute) log_warning(message("computes in {}", computed.reason));  // stdout is the answer's
  FolderText tools = model_options.text_tools(adapter);
  std::vector<Prompt> prompts;
  if (one) {
    prompts.push_back(prompt_of(prompt, prompts_are, tools));
  } else {
    for (const std::string& name : row_files_of(data == "-" ? "/dev/stdin" : data, Split::kEval)) {
      for (Prompt& read : read_prompts(name, prompts_are, tools)) prompts.push_back(std::move(read));
      remove_made(name);
    }
    tools.require_tokenizer(data);  // the answers are text
  }
  for (const Prompt& given : prompts) {
    QLORAPP_CHECK_VALUE(std::ssize(given.ids) < config.max_position_embeddings,
                        "[generate] a prompt must have fewer tokens than the model has positions ({}); that {} has {}. Shorten it.",
                        config.max_position_embeddings, one ? std::string("of --prompt") : message("of line {}", given.line),
                        given.ids.size());
  }
  std::unique_ptr<files::GrowingFile> file;
  if (!output_file.empty()) file = std::make_unique<files::GrowingFile>(output_file, /*must_be_new=*/true);
  CausalLM model = model_options.load(computed.dtype);
  if (!adapter.empty()) load_adapter(model, adapter);
  options.add_ends(model, tools, !prompts_are.raw && tools.has_template());
  if (!one) return answer_all(model, tools, prompts, options.generate, file.get());
  answer_one(model, tools, prompts.front(), options.generate);
  return 0;
}

}  // namespace qlorapp::cli
