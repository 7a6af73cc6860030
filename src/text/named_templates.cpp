// SPDX-License-Identifier: Apache-2.0
#include "named_templates.hpp"

#include "core/check.hpp"

namespace qlorapp::sources {

constexpr std::string_view kAlternate =
    R"({% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must alternate, the user first') }}{% endif %})";
constexpr std::string_view kSystemFirst =
    R"({% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %})"
    R"({% else %}{% set loop_messages = messages %}{% endif %})";

/// Llama-2-chat.
std::string llama2() {
  return together({R"({% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %})",
                   R"({% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %})",
                   R"({% set system_message = false %}{% endif %}{% for message in loop_messages %})", kAlternate,
                   R"({% if loop.index0 == 0 and system_message != false %})",
                   R"({% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %})",
                   R"({% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %})",
                   R"({{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}{% elif message['role'] == 'assistant' %})",
                   R"({{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %})"});
}

/// Mistral-7B-Instruct-v0.1 and v0.2 ("v1"), with a system message.
std::string mistral_v1() {
  return together({kSystemFirst, "{{ bos_token }}{% for message in loop_messages %}", kAlternate,
                   R"({% if message['role'] == 'user' %}{% if loop.first and system_message is defined %})",
                   R"({{ ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }})",
                   R"({% else %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% endif %})",
                   R"({% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }})",
                   R"({% else %}{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %})"});
}

/// Mistral-7B-Instruct-v0.3 ("v3") and Mistral-Nemo ("v3-tekken"), as far as a conversation without tools reaches.
std::string mistral_v3(std::string_view inst, std::string_view answer) {
  return together({kSystemFirst, "{% set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}",
                   "{% set ns = namespace() %}{% set ns.index = 0 %}{% for message in loop_messages %}",
                   "{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('user and assistant must "
                   "alternate, the user first') }}{% endif %}",
                   "{% set ns.index = ns.index + 1 %}{% endfor %}{{ bos_token }}{% for message in loop_messages %}",
                   "{% if message['role'] == 'user' %}{% if loop.last and system_message is defined %}{{ '", inst,
                   R"(' + system_message + '\n\n' + message['content'] + '[/INST]' }}{% else %}{{ ')", inst,
                   "' + message['content'] + '[/INST]' }}{% endif %}{% elif message['role'] == 'assistant' %}{{ ", answer,
                   " + eos_token }}{% else %}{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %}"});
}

/// Mistral-Large-Instruct-2411 ("v7").
std::string mistral_v7() {
  return R"({{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }})"
         R"({% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]' }})"
         R"({% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('roles are user and assistant') }}{% endif %})"
         R"({% endfor %})";
}

constexpr std::string_view kGemmaRole =
    R"({% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %})";
constexpr std::string_view kGemmaPrompt = R"({% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %})";

/// Gemma 1 and 2.
std::string gemma() {
  return together(
      {"{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('a system message is not supported') }}{% endif "
       "%}",
       "{% for message in messages %}", kAlternate, kGemmaRole,
       R"({{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }})", kGemmaPrompt});
}

/// Gemma 3; the messages of a row are strings.
std::string gemma3() {
  return together({"{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}",
                   R"({% set first_user_prefix = messages[0]['content'] + '\n\n' %}{% else %})",
                   R"({% set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %})",
                   R"({% set loop_messages = messages[1:] %}{% else %}{% set first_user_prefix = "" %})",
                   "{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}", kAlternate, kGemmaRole,
                   R"({{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }})",
                   "{% if message['content'] is string %}{{ message['content'] | trim }}{% elif message['content'] is iterable %}",
                   "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}",
                   "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}",
                   R"({% else %}{{ raise_exception('a content must be a text or a list') }}{% endif %}{{ '<end_of_turn>\n' }})",
                   kGemmaPrompt});
}

/// One branch a role, as Phi-3 and Phi-4 write them; `before` and `behind` stand around the message in single quotes.
static std::string role_branches(std::string_view before, std::string_view middle, std::string_view behind,
                                 std::string_view after) {
  std::string out = "{% for message in messages %}{% ";
  for (const std::string_view role : {"system", "user", "assistant"}) {
    out += together({role == "system" ? "if" : "{% elif", " message['role'] == '", role, "' %}{{ '", before, role, middle,
                     "' + message['content'] + '", behind, "' }}"});
  }
  return out += together({"{% endif %}{% endfor %}", after});
}

constexpr std::string_view kPhiEnd = R"({% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %})";
std::string phi3() { return role_branches("<|", "|>\\n", "<|end|>\\n", kPhiEnd); }
/// Phi-4-mini; the first branch is that of a system message with a list of tools.
std::string phi4_mini() {
  return R"({% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %})"
         R"({{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }})"
         R"({% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %})"
         R"({% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %})";
}
std::string phi4() {
  return role_branches("<|im_start|>", "<|im_sep|>", "<|im_end|>",
                       R"({% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %})");
}

/// Zephyr and TinyLlama-Chat.
std::string zephyr() {
  return R"({% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token + '\n' }})"
         R"({% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + eos_token + '\n' }})"
         R"({% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% endif %})"
         R"({% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %})";
}

constexpr std::string_view kAlpacaPrompt = R"({% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %})";
/// Alpaca over several turns, without an introduction.
std::string alpaca() {
  return together(
      {R"({% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] | trim + '\n\n' %})",
       "{% set messages = messages[1:] %}{% else %}{% set system_message = '' %}{% endif %}{{ bos_token + system_message }}",
       "{% for message in messages %}", kAlternate,
       R"({% if message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] | trim + '\n\n' }})",
       R"({% elif message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'] | trim + eos_token + '\n\n' }})",
       "{% endif %}", kAlpacaPrompt});
}
/// Meta-Llama-3-Instruct.
std::string llama3() {
  return R"({% set loop_messages = messages %}{% for message in loop_messages %})"
         R"({% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %})"
         R"({% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %})"
         R"({% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})";
}

std::string chatml() {
  return R"({% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %})"
         R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})";
}

/// Granite 3.0, as far as a conversation without tools reaches.
std::string granite() {
  constexpr std::string_view kEnd = "{% endfor %}";
  std::string out = role_branches("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\\n", "");
  out.resize(out.size() - kEnd.size());
  return together(
      {out, "{% if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}", kEnd});
}

/// Command R and Aya.
std::string cohere() {
  return together(
      {"{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}",
       "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false "
       "%}",
       "{% endif %}{% if system_message != false %}",
       "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}",
       "{% for message in loop_messages %}", kAlternate, "{% set content = message['content'] %}{% if message['role'] == 'user' %}",
       "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content | trim + '<|END_OF_TURN_TOKEN|>' }}",
       "{% elif message['role'] == 'assistant' %}",
       "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content | trim + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}",
       "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"});
}

std::string tulu(bool with_bos) {
  constexpr std::string_view kAnswer = R"({{ '<|assistant|>\n' + message['content'] + eos_token)";
  return together(
      {with_bos ? "{{ bos_token }}" : "", "{% for message in messages %}{% if message['role'] == 'system' %}",
       R"({{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %})",
       R"({{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %})", kAnswer,
       R"( + '\n' }}{% else %})", kAnswer, " }}{% endif %}{% endif %}",
       R"({% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %})"});
}

/// EXAONE 3.5.
std::string exaone() {
  return R"({% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '[|system|][|endofturn|]\n' }}{% endif %})"
         R"({{ '[|' + message['role'] + '|]' + message['content'] }}{% if message['role'] == 'user' %}{{ '\n' }}{% else %})"
         R"({{ '[|endofturn|]\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %})";
}

/// DeepSeek-R1-Distill, as far as a conversation without tools reaches.
std::string deepseek_distill() {
  return R"({% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}{% for message in messages %})"
         R"({% if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{% endif %}{% endfor %}{{ bos_token }})"
         R"({{ ns.system_prompt }}{% for message in messages %}{% if message['role'] == 'user' %}{% set ns.is_tool = false %})"
         R"({{ '<｜User｜>' + message['content'] }}{% endif %}{% if message['role'] == 'assistant' %}{% set content = message['content'] %})"
         R"({% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %})"
         R"({{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %})"
         R"({% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %})";
}

}  // namespace qlorapp::sources
