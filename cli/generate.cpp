// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/generate.hpp"

#include <cstdio>

#include "command.hpp"
#include "model_options.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"

namespace qlorapp::cli {

int generate(const Arguments& arguments) {
  ModelOptions model_options;
  std::string prompt, adapter, dtype = "float32", system;
  bool raw = false;
  GenerateOptions options;
  CommandLine line("generate", "Continues a prompt greedily. With a chat template the prompt is a user's turn.");
  model_options.add_to(line);
  line.option("prompt", prompt, "text", true);
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("system", system, "system message, where the model has a chat template");
  line.option("raw", raw, "continue the text itself, without the chat template");
  line.option("max_new_tokens", options.max_new_tokens, "tokens at most");
  line.option("dtype", dtype, "of the computation: float32, bfloat16 or float16");
  line.parse(arguments);

  (void)format::load_model_config(model_options.model);  // a folder that is no model is said first
  const TextTools tools = TextTools::open(model_options.model);
  std::vector<TokenId> ids;
  if (tools.chat && !raw) {
    std::vector<Message> messages;
    if (!system.empty()) messages.push_back({"system", system});
    messages.push_back({"user", prompt});
    ids = tools.tokenizer->encode(tools.chat->render(messages, {.add_generation_prompt = true, .date_string = std::nullopt}).text,
                                  false);
  } else {
    QLORAPP_CHECK_VALUE(system.empty(), "[generate] --system needs a model with a chat template.");
    ids = tools.tokenizer->encode(prompt, true);
  }
  CausalLM model = model_options.load(parse_dtype(dtype));
  if (!adapter.empty()) load_adapter(model, adapter);
  options.eos_token_ids = model.config().eos_token_ids;
  for (const TokenId id : tools.tokenizer->eos_ids()) options.eos_token_ids.push_back(id);
  if (tools.chat && !raw) {
    if (const auto end = tools.tokenizer->token_to_id(tools.chat->end_of_turn())) options.eos_token_ids.push_back(*end);
  }
  const std::vector<int64_t> generated = qlorapp::generate(model, {ids.begin(), ids.end()}, options);
  const std::vector<TokenId> answer(generated.begin(), generated.end());
  std::printf("%s\n", tools.tokenizer->decode(answer, /*skip_special_tokens=*/true).c_str());
  return 0;
}

}  // namespace qlorapp::cli
