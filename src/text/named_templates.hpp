// SPDX-License-Identifier: Apache-2.0
/// The Jinja of the templates that --chat_template chooses by name, as their models publish it, in one spelling. Torch-free.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace qlorapp::sources {

/// One part behind the other. Jinja is full of braces, which a format would have to double.
[[nodiscard]] inline std::string together(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

[[nodiscard]] std::string llama2();
[[nodiscard]] std::string mistral_v1();
[[nodiscard]] std::string mistral_v3(std::string_view inst, std::string_view answer);
[[nodiscard]] std::string mistral_v7();
[[nodiscard]] std::string gemma();
[[nodiscard]] std::string gemma3();
[[nodiscard]] std::string phi3();
[[nodiscard]] std::string phi4_mini();
[[nodiscard]] std::string phi4();
[[nodiscard]] std::string zephyr();
[[nodiscard]] std::string alpaca();
[[nodiscard]] std::string llama3();
[[nodiscard]] std::string chatml();
[[nodiscard]] std::string granite();
[[nodiscard]] std::string cohere();
/// With BOS: OLMo 2.
[[nodiscard]] std::string tulu(bool with_bos);
[[nodiscard]] std::string exaone();
[[nodiscard]] std::string deepseek_distill();

// Those that write tools (named_tool_templates.cpp).
/// Llama 3.1 and 3.2.
[[nodiscard]] std::string llama31();
[[nodiscard]] std::string qwen25();
[[nodiscard]] std::string qwen3();
/// The Instruct models of 2507, which do not think.
[[nodiscard]] std::string qwen3_instruct();

}  // namespace qlorapp::sources
