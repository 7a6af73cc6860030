// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstdio>

#include "command.hpp"
#include "core/check.hpp"
#include "generation_options.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"

namespace qlorapp::cli {

int generate(const Arguments& arguments) {
  ModelOptions model_options;
  std::string prompt, adapter, system;
  bool raw = false;
  GenerationOptions options;
  CommandLine line(
      "generate", "--model DIR --prompt TEXT [--adapter DIR]",
      "Continues a prompt; greedy unless an option of sampling is given. With a chat template the prompt is a user turn.");
  model_options.add_loading_to(line);
  model_options.add_template_to(line);
  line.option("prompt", prompt, "text to continue", true);
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("system", system, "system message; requires a chat template");
  line.option("raw", raw, "do not apply the chat template");
  options.add_to(line);
  line.group("Model", {"model", "adapter", "device", "dtype", "quant_type", "double_quant", "block_size", "load_in_4bit"});
  line.group("Text", {"prompt", "system", "chat_template", "raw", "max_new_tokens", "min_new_tokens"});
  line.parse(arguments);
  model_options.open();
  options.settle(line);
  const format::ModelConfig config = model_options.config();
  const ComputeDtype computed = model_options.choose_dtype(config);
  check_adapter_folder("adapter", adapter);
  if (computed.is_substitute) log_warning(message("computes in {}", computed.reason));  // stdout is the answer's
  FolderText tools = model_options.text_tools(adapter);
  tools.require_tokenizer("--prompt");
  const bool chat = !raw && tools.has_template();
  QLORAPP_CHECK_VALUE(chat || system.empty(), "[generate] --system needs a model with a chat template.");
  std::vector<Message> messages;
  if (!system.empty()) messages.push_back({"system", system});
  messages.push_back({"user", prompt});
  const std::vector<TokenId> ids =
      chat ? tools.encode(tools.render(messages, {.add_generation_prompt = true, .turns = false}).text, false).ids
           : tools.encode(prompt, true).ids;
  CausalLM model = model_options.load(computed.dtype);
  if (!adapter.empty()) load_adapter(model, adapter);
  options.add_ends(model, tools, chat);
  // A terminal would obey control characters; a file or another program gets the text as it is.
  const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  GrowingText shown(tools, [&](std::string_view piece) {
    if (is_terminal) print_text(stdout, piece);
    else std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  });
  options.generate.on_token = [&](int64_t, int64_t token) {
    shown.add(token);
    return true;
  };
  static_cast<void>(qlorapp::generate(model, std::vector<int64_t>(ids.begin(), ids.end()), options.generate));
  shown.finish();
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace qlorapp::cli
