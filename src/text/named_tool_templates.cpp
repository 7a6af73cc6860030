// SPDX-License-Identifier: Apache-2.0
#include "named_templates.hpp"

#include "core/check.hpp"

namespace qlorapp::sources {
namespace {

constexpr std::string_view kHermesBefore =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures "
    "within <tools></tools> XML tags:\n<tools>";
constexpr std::string_view kHermesBehind =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    "XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";
constexpr std::string_view kLlama31Before =
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers "
    "the given prompt.\n\n";
constexpr std::string_view kLlama31Format =
    "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}."
    "Do not use variables.\n\n";

/// A string of Jinja.
std::string quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\n') out += "\\n";
    else if (c == '\\' || c == '\'') out += std::string("\\") + c;
    else out += c;
  }
  return out += "'";
}

std::string emit(std::string_view text) { return together({"{{ ", quoted(text), " }}"}); }

/// ChatML's header. @param with_tools  the system message in front of the tools. @param without_tools  its `else`, if there is one.
std::string hermes_head(std::string_view with_tools, std::string_view without_tools) {
  return together({R"({% if tools %}{{ '<|im_start|>system\n' }})", with_tools, emit(kHermesBefore),
                   R"({% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %})", emit(kHermesBehind),
                   R"({{ '<|im_end|>\n' }}{% else %}{% if messages[0]['role'] == 'system' %})",
                   R"({{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }})", without_tools,
                   "{% endif %}{% endif %}"});
}

/// The results of tools, which stand together in a user's turn.
std::string hermes_results(std::string_view first, std::string_view content) {
  return together(
      {R"({% elif message.role == 'tool' %}{% if )", first, R"( or (messages[loop.index0 - 1].role != 'tool') %})",
       R"({{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' }}{{ )", content, R"( }}{{ '\n</tool_response>' }})",
       R"({% if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %})",
       R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }})"});
}

constexpr std::string_view kContentIfString =
    R"({% if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %})";
constexpr std::string_view kQwen3Turn =
    R"({% if (message.role == 'user') or (message.role == 'system' and not loop.first) %})"
    R"({{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{% elif message.role == 'assistant' %})";
constexpr std::string_view kQwen3Calls =
    R"({% if message.tool_calls %}{% for tool_call in message.tool_calls %}{% if (loop.first and content) or (not loop.first) %})"
    R"({{ '\n' }}{% endif %}{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %})"
    R"({{ '<tool_call>\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}{% if tool_call.arguments is string %})"
    R"({{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}{% endfor %}{% endif %})"
    R"({{ '<|im_end|>\n' }})";

std::string qwen3_head() {
  return hermes_head(R"({% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %})", "");
}

}  // namespace

std::string llama31() {
  const std::string tools = R"({% for t in tools %}{{ t | tojson(indent=4) }}{{ "\n\n" }}{% endfor %})";
  return together(
      {"{{ bos_token }}{% if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}",
       R"({% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}{% if not tools is defined %})",
       "{% set tools = none %}{% endif %}",
       R"({% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content']|trim %}{% set messages = messages[1:] %})",
       R"({% else %}{% set system_message = "" %}{% endif %}{{ "<|start_header_id|>system<|end_header_id|>\n\n" }})",
       R"({% if tools is not none %}{{ "Environment: ipython\n" }}{% endif %}{{ "Cutting Knowledge Date: December 2023\n" }})",
       R"({{ "Today Date: " + date_string + "\n\n" }}{% if tools is not none and not tools_in_user_message %})",
       emit("You have access to the following functions. To call a function, please respond with JSON for a function call."),
       emit(kLlama31Format),
       tools,
       R"({% endif %}{{ system_message }}{{ "<|eot_id|>" }})",
       "{% if tools_in_user_message and not tools is none %}{% if messages | length != 0 %}",
       "{% set first_user_message = messages[0]['content']|trim %}{% set messages = messages[1:] %}{% else %}",
       R"({{ raise_exception('tools need a first user message') }}{% endif %}{{ '<|start_header_id|>user<|end_header_id|>\n\n' }})",
       emit(kLlama31Before),
       emit(kLlama31Format),
       tools,
       R"({{ first_user_message + "<|eot_id|>" }}{% endif %}{% for message in messages %})",
       "{% if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}",
       R"({{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }})",
       "{% elif 'tool_calls' in message %}{% if not message.tool_calls|length == 1 %}{{ raise_exception('one tool call at a time') "
       "}}{% endif %}",
       R"({% set tool_call = message.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }})",
       R"({{ '{"name": "' + tool_call.name + '", ' }}{{ '"parameters": ' }}{{ tool_call.arguments | tojson }}{{ "}" }}{{ "<|eot_id|>" }})",
       R"({% elif message.role == "tool" or message.role == "ipython" %}{{ "<|start_header_id|>ipython<|end_header_id|>\n\n" }})",
       "{% if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}{% else %}",
       R"({{ message.content }}{% endif %}{{ "<|eot_id|>" }}{% endif %}{% endfor %})",
       R"({% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})"});
}

std::string qwen25() {
  return together(
      {hermes_head(
           R"({% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}{{ 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}{% endif %}{{ '\n\n' }})",
           R"({% else %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }})"),
       R"({% for message in messages %}{% if (message.role == "user") or (message.role == "system" and not loop.first) or )",
       R"((message.role == "assistant" and not message.tool_calls) %})",
       R"({{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% elif message.role == "assistant" %})",
       R"({{ '<|im_start|>' + message.role }}{% if message.content %}{{ '\n' + message.content }}{% endif %})",
       R"({% for tool_call in message.tool_calls %}{% if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %})",
       R"({{ '\n<tool_call>\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}{{ tool_call.arguments | tojson }})",
       R"({{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }})", hermes_results("(loop.index0 == 0)", "message.content"),
       "{% endif %}"});
}

std::string qwen3() {
  return together(
      {qwen3_head(), "{% set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}",
       "{% for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}",
       "{% if ns.multi_step_tool and message.role == 'user' and message.content is string and ",
       "not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}",
       "{% set ns.multi_step_tool = false %}{% set ns.last_query_index = index %}{% endif %}{% endfor %}{% for message in messages "
       "%}",
       kContentIfString, kQwen3Turn, "{% set reasoning_content = '' %}{% if message.reasoning_content is string %}",
       "{% set reasoning_content = message.reasoning_content %}{% else %}{% if '</think>' in content %}",
       R"({% set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %})",
       R"({% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{% endif %})",
       "{% if loop.index0 > ns.last_query_index %}{% if loop.last or (not loop.last and reasoning_content) %}",
       R"({{ '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }})",
       R"({% else %}{{ '<|im_start|>' + message.role + '\n' + content }}{% endif %}{% else %})",
       R"({{ '<|im_start|>' + message.role + '\n' + content }}{% endif %})", kQwen3Calls, hermes_results("loop.first", "content"),
       R"({% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %})"});
}

std::string qwen3_instruct() {
  return together({qwen3_head(), "{% for message in messages %}", kContentIfString, kQwen3Turn,
                   R"({{ '<|im_start|>' + message.role + '\n' + content }})", kQwen3Calls, hermes_results("loop.first", "content"),
                   "{% endif %}"});
}

}  // namespace qlorapp::sources
