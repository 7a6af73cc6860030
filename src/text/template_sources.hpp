// SPDX-License-Identifier: Apache-2.0
/// The Jinja of the built-in templates as their models publish it, in one spelling; {SYSTEM} stands for any text. Torch-free.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace qlorapp {

namespace sources {

/// One part behind the other. Jinja is full of braces, which a format would have to double.
[[nodiscard]] inline std::string together(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

[[nodiscard]] std::string llama2();
[[nodiscard]] std::string mistral_first(std::string_view behind);
[[nodiscard]] std::string mistral_v1();
[[nodiscard]] std::string mistral_v3(std::string_view inst, std::string_view answer);
[[nodiscard]] std::string mistral_v7();
[[nodiscard]] std::string gemma();
[[nodiscard]] std::string gemma3();
[[nodiscard]] std::string phi3(std::string_view system_if);
[[nodiscard]] std::string phi3_pairs(bool with_bos);
[[nodiscard]] std::string phi3_small();
[[nodiscard]] std::string phi4_mini();
[[nodiscard]] std::string phi4();
[[nodiscard]] std::string phi4_pairs();
[[nodiscard]] std::string zephyr();
[[nodiscard]] std::string alpaca();
[[nodiscard]] std::string alpaca_introduced();
[[nodiscard]] std::string llama3();
[[nodiscard]] std::string chatml(bool with_default);
[[nodiscard]] std::string granite();
[[nodiscard]] std::string cohere();
/// With BOS: OLMo 2.
[[nodiscard]] std::string tulu(bool with_bos);
[[nodiscard]] std::string exaone();
[[nodiscard]] std::string deepseek_distill();

// Those that write tools (tool_template_sources.cpp).
/// Llama 3.1 and 3.2, which differ in the date that stands where none is given.
[[nodiscard]] std::string llama31(bool today);
[[nodiscard]] std::string qwen25();
[[nodiscard]] std::string qwen3();
/// The Instruct models of 2507, which do not think.
[[nodiscard]] std::string qwen3_instruct();

}  // namespace sources

/// What the templates say about the tools, which their rendering says too (chat_tools.cpp).
inline constexpr std::string_view kHermesBefore =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures "
    "within <tools></tools> XML tags:\n<tools>";
inline constexpr std::string_view kHermesBehind =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    "XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";
inline constexpr std::string_view kLlama31Before =
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers "
    "the given prompt.\n\n";
inline constexpr std::string_view kLlama31Format =
    "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}."
    "Do not use variables.\n\n";

}  // namespace qlorapp
