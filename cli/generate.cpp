// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include "answering_model.hpp"
#include "command.hpp"
#include "core/check.hpp"
#include "files/growing_file.hpp"
#include "generation_options.hpp"
#include "hub.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/prompts.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/memory/generation_plan.hpp"
#include "qlorapp/memory/gpu_table.hpp"
#include "stop_signals.hpp"
#include "text/unicode.hpp"

namespace qlorapp::cli {
namespace {

/// A signal, on its way out of the generation.
struct Stopped {};

std::vector<int64_t> ids_of(const Prompt& prompt) { return {prompt.ids.begin(), prompt.ids.end()}; }

/// The answer appears while it grows.
void answer_one(CausalLM& model, FolderText& tools, const Prompt& prompt, GenerateOptions options, StopStrings stops) {
  const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  GrowingText shown(tools, [&](std::string_view piece) { show(piece, is_terminal); });
  stops.begin(0, prompt.ids);
  options.on_token = [&](int64_t row, int64_t token) {
    shown.add(token);
    return !stops.add(row, static_cast<TokenId>(token));
  };
  const auto began = std::chrono::steady_clock::now();
  static_cast<void>(generate(model, ids_of(prompt), options));
  shown.finish();
  std::fputc('\n', stdout);
  std::fflush(stdout);
  if (is_terminal) print_line(stderr, message("[{}]", speed_text(shown.tokens(), began)));
  for (const std::string& line : stops.unmatched()) print_line(stderr, line);
}

/// Answers in the order of their prompts, one JSON object a line.
class AnswerLines {
 public:
  AnswerLines(const std::vector<Prompt>& prompts, FolderText& tools, files::GrowingFile* file)
      : prompts_(prompts), tools_(tools), file_(file), waiting_(prompts.size()) {}

  /// @param stopped  whether something ended the answer before its length did.
  void add(int64_t row, std::span<const int64_t> tokens, bool stopped) {
    const Prompt& prompt = prompts_[static_cast<size_t>(row)];
    const std::string text = tools_.decode(std::vector<TokenId>(tokens.begin(), tokens.end()), /*skip_special_tokens=*/true);
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

/// @param output_file  a new file; empty: standard output.
int answer_all(CausalLM& model, FolderText& tools, const std::vector<Prompt>& prompts, GenerateOptions options, StopStrings stops,
               const std::string& output_file) {
  const StopSignals noted({SIGINT, SIGTERM, SIGHUP});
  std::optional<files::GrowingFile> file;
  if (!output_file.empty()) file.emplace(output_file, /*must_be_new=*/true);
  AnswerLines lines(prompts, tools, file ? &*file : nullptr);
  ProgressBar bar("generating");
  std::vector<std::vector<int64_t>> ids;
  for (const Prompt& prompt : prompts) ids.push_back(ids_of(prompt));
  int64_t done = 0;
  for (size_t row = 0; row < prompts.size(); ++row) stops.begin(static_cast<int64_t>(row), prompts[row].ids);
  options.on_token = [&](int64_t row, int64_t token) {
    if (StopSignals::received() != 0) throw Stopped();
    return !stops.add(row, static_cast<TokenId>(token));
  };
  options.on_end = [&](int64_t row, std::span<const int64_t> tokens) {
    lines.add(row, tokens, ended(options, stops, row, tokens));
    if (file) bar.update(++done, std::ssize(prompts));
  };
  const auto began = std::chrono::steady_clock::now();
  bool stopped = false;
  try {
    static_cast<void>(generate(model, ids, options));
  } catch (const Stopped&) { stopped = true; }
  print_line(stderr, message("{}{}{}", stopped ? "stopped: " : "", lines.summary(began),
                             file && lines.written() > 0 ? message(": {}", file->path()) : std::string()));
  if (stopped) return 128 + StopSignals::received();
  for (const std::string& line : stops.unmatched()) print_line(stderr, line);
  return 0;
}

/// Refuses what the model's positions or the memory cannot hold, before a weight is loaded, and sets the size of the cache.
/// @param places  of the prompts, as "file:line".
void settle_memory(const AnsweringModel& model, const std::vector<Prompt>& prompts, const std::vector<std::string>& places,
                   GenerateOptions& options) {
  GenerationRows rows{.prompts = {},
                      .max_new_tokens = options.max_new_tokens,
                      .fits_positions = options.fits_positions,
                      .max_rows = options.deterministic ? 1 : options.max_rows,
                      .cache = {options.cache_bytes},
                      .sampling = options.sampling,
                      .has_adapter = model.has_adapter()};
  std::vector<std::vector<int64_t>> ids;
  for (const Prompt& prompt : prompts) {
    ids.push_back(ids_of(prompt));
    rows.prompts.push_back(std::ssize(prompt.ids));
  }
  check_generation(model.config(), ids, options, places);
  rows.shared = shared_tokens(model.config(), ids, options);
  const PlanSettings settings = model.plan_settings();
  const auto planned = [&] { return plan_generation(settings, rows, generation_room(memory_for(model.device()))); };
  GenerationPlan plan;
  try {
    plan = planned();
  } catch (const ValueError&) {
    if (!rows.has_adapter) throw;
    rows.has_adapter = false;  // where the adapter is at fault, loading it names its file
    plan = planned();
  }
  require_fit(plan, rows);
  log_debug(summary_line(plan, settings));
  options.cache_bytes = plan.cache.count;
  options.max_rows = plan.rows;
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
  line.option("output_file", output_file, "a new file for the answers, JSON lines; unset or -: standard output");
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("system", prompts_are.system, "system message; requires a chat template");
  line.option("raw", prompts_are.raw, "do not apply the chat template");
  options.add_to(line);
  line.option("max_rows", options.generate.max_rows, "prompts that are computed at once, at most");
  line.option("cache_memory", cache_memory, "of keys and values, at most, as 4GB; unset: what the device's memory leaves to them");
  line.option("deterministic", options.generate.deterministic,
              "compute one row after the other: each answer then has the bits of its prompt alone; slower with several prompts");
  line.group("Model", {"model", "adapter", "device", "dtype", "quant_type", "double_quant", "block_size", "load_in_4bit"});
  line.group("Text", {"prompt", "system", "chat_template", "raw", "max_new_tokens", "min_new_tokens", "stop_strings"});
  line.group("Several prompts", {"data", "data_format", "dataset_text_field", "prompt_column", "completion_column",
                                 "messages_column", "output_file", "max_rows", "cache_memory", "deterministic"});
  GenerationOptions::group(line);
  line.parse(arguments);
  row_options.apply_to(prompts_are.rows);
  const bool one = line.given("prompt");
  QLORAPP_CHECK_VALUE(!line.given("output_file") || !output_file.empty(),
                      "[output_file] must be the name of a new file; got ''. Leave it out for standard output.");
  if (output_file == "-") output_file.clear();
  QLORAPP_CHECK_VALUE(!one || data.empty(), "[generate] the prompts must come from --prompt or --data; got both. Leave one out.");
  if (!one && data.empty() && ::isatty(STDIN_FILENO) != 1) data = "-";
  QLORAPP_CHECK_VALUE(one || !data.empty(),
                      "[generate] there must be a prompt: give --prompt TEXT, --data FILE, or text through a pipe.");
  QLORAPP_CHECK_VALUE(!one || output_file.empty(),
                      "[output_file] is for the prompts of --data; --prompt writes to standard output.");
  if (!cache_memory.empty()) options.generate.cache_bytes = parse_bytes("cache_memory", cache_memory).count;
  AnsweringModel answering(model_options, options, line, {adapter});
  FolderText& tools = answering.tools();
  std::vector<Prompt> prompts;
  std::vector<std::string> places;
  if (one) {
    places.emplace_back("generate");
    prompts.push_back(prompt_of(prompt, prompts_are, tools));
  } else {
    for (const std::string& name : row_files_of(data == "-" ? "/dev/stdin" : data, Split::kEval)) {
      for (Prompt& read : read_prompts(name, prompts_are, tools)) {
        places.push_back(message("{}:{}", name, read.line));
        prompts.push_back(std::move(read));
      }
      remove_made(name);
    }
    tools.require_tokenizer(data);  // the answers are text
  }
  settle_memory(answering, prompts, places, options.generate);
  if (!output_file.empty()) files::GrowingFile::check_new(output_file);  // before weights are read
  CausalLM model = answering.load(options, !prompts_are.raw && tools.has_template());
  if (!one) return answer_all(model, tools, prompts, options.generate, options.stops(tools), output_file);
  answer_one(model, tools, prompts.front(), options.generate, options.stops(tools));
  return 0;
}

}  // namespace qlorapp::cli
