// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <unistd.h>

#include <cstdio>

#include "command.hpp"
#include "core/check.hpp"
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
  int64_t seed = 42;
  GenerateOptions options;
  CommandLine line(
      "generate", "--model DIR --prompt TEXT [--adapter DIR]",
      "Continues a prompt; greedy unless an option of sampling is given. With a chat template the prompt is a user turn.");
  model_options.add_loading_to(line);
  model_options.add_template_to(line);
  line.option("prompt", prompt, "text to continue", true);
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("system", system, "system message; requires a chat template");
  line.option("raw", raw, "do not apply the chat template");
  line.option("max_new_tokens", options.max_new_tokens, "maximum number of new tokens");
  line.option("min_new_tokens", options.min_new_tokens, "minimum number of new tokens");
  line.option("do_sample", options.sampling.do_sample,
              "sample tokens by their probability instead of choosing the most probable; "
              "unset: true with temperature, top_k, top_p or min_p");
  line.option("temperature", options.sampling.temperature, "divides the logits");
  line.option("top_k", options.sampling.top_k, "sample among this many most probable tokens; 0: all");
  line.option("top_p", options.sampling.top_p, "sample among the fewest tokens that reach this probability");
  line.option("min_p", options.sampling.min_p, "sample among tokens with at least this share of the largest probability");
  line.option("repetition_penalty", options.sampling.repetition_penalty, "above 1: tokens that already occur become less probable");
  line.option("seed", seed, "seed of the sampling");
  line.group("Model", {"model", "adapter", "device", "dtype", "quant_type", "double_quant", "block_size", "load_in_4bit"});
  line.group("Text", {"prompt", "system", "chat_template", "raw", "max_new_tokens", "min_new_tokens"});
  line.group("Sampling", {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"});
  line.parse(arguments);
  model_options.open();
  for (const char* name : {"temperature", "top_k", "top_p", "min_p"}) {
    if (!line.given(name)) continue;
    if (!line.given("do_sample")) options.sampling.do_sample = true;
    if (!options.sampling.do_sample) log_warning(message("[generate] --{} has no effect with --do_sample false", name));
  }

  QLORAPP_CHECK_VALUE(seed >= 0, "[seed] must be an integer >= 0; got {}.", seed);
  options.sampling.seed = static_cast<uint64_t>(seed);
  options.sampling.validate();
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
  options.eos_token_ids = model.config().eos_token_ids;
  for (const TokenId id : tools.eos_ids()) options.eos_token_ids.push_back(id);
  if (const auto end = chat ? tools.end_of_turn() : std::nullopt) {
    if (const auto id = tools.token_to_id(*end)) options.eos_token_ids.push_back(*id);
  }
  const std::vector<int64_t> generated = qlorapp::generate(model, std::vector<int64_t>(ids.begin(), ids.end()), options);
  const std::vector<TokenId> answer(generated.begin(), generated.end());
  const std::string text = tools.decode(answer, /*skip_special_tokens=*/true) + "\n";
  // A terminal would obey control characters; a file or another program gets the text as it is.
  if (::isatty(STDOUT_FILENO) == 1) print_text(stdout, text);
  else std::fwrite(text.data(), 1, text.size(), stdout);
  return 0;
}

}  // namespace qlorapp::cli
