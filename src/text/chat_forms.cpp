// SPDX-License-Identifier: Apache-2.0
#include "chat_form.hpp"

#include <algorithm>

#include "template_sources.hpp"

namespace qlorapp {
namespace {

TurnForm turn(std::string_view head, std::string_view end, std::string_view behind = {}, bool trim = false) {
  return {.head = head, .end = end, .behind = behind, .trim = trim};
}

std::vector<ChatForm> make_forms() {
  using enum SystemPlace;
  const TurnForm inst = turn("[INST] ", " [/INST]"), im = turn("<|im_start|>{role}\n", "<|im_end|>", "\n");
  const TurnForm header = turn("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "", true);
  const TurnForm gemma_user = turn("<start_of_turn>user\n", "<end_of_turn>", "\n", true);
  const TurnForm gemma_model = turn("<start_of_turn>model\n", "<end_of_turn>", "\n", true);
  const TurnForm line = turn("<|{role}|>\n", "<|end|>", "\n"), zephyr = turn("<|{role}|>\n", "{eos}", "\n");
  const TurnForm phi4 = turn("<|im_start|>{role}<|im_sep|>", "<|im_end|>"), phi4_mini = turn("<|{role}|>", "<|end|>");
  const TurnForm before_user = turn("", "\n\n");

  std::vector<ChatForm> forms{
      {.name = "llama2",
       .sources = {sources::llama2()},
       .begin = "",
       .system = turn("<<SYS>>\n", "\n<</SYS>>\n\n"),
       .user = turn("{bos}[INST] ", " [/INST]", "", true),
       .assistant = {.lead = " ", .tail = " ", .end = "{eos}", .trim = true},
       .system_place = kJoined,
       .alternates = true},
      {.name = "llama3",
       .sources = {sources::llama3()},
       .begin = "{bos}",
       .system = header,
       .user = header,
       .assistant = header,
       .prompt = "<|start_header_id|>assistant<|end_header_id|>\n\n",
       .any_role = true},
      {.name = "llama3.1",
       .sources = {sources::llama31(false), sources::llama31(true)},
       .begin = "{bos}",
       .system = turn("<|start_header_id|>system<|end_header_id|>\n\n{environment}Cutting Knowledge Date: December 2023\n"
                      "Today Date: {date}\n\n",
                      "<|eot_id|>", "", true),
       .user = header,
       .assistant = header,
       .prompt = "<|start_header_id|>assistant<|end_header_id|>\n\n",
       .default_system = "",
       .any_role = true,
       .tools = ToolStyle::kLlama31},
      {.name = "chatml",
       .sources = {sources::chatml(false), sources::chatml(true)},
       .system = im,
       .user = im,
       .assistant = im,
       .prompt = "<|im_start|>assistant\n",
       .any_role = true},
      {.name = "qwen2.5",
       .sources = {sources::qwen25()},
       .system = im,
       .user = im,
       .assistant = im,
       .prompt = "<|im_start|>assistant\n",
       .default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
       .tools = ToolStyle::kHermes},
      {.name = "qwen3",
       .sources = {sources::qwen3()},
       .system = im,
       .user = im,
       .assistant = im,
       .prompt = "<|im_start|>assistant\n",
       .thinks = true,
       .tools = ToolStyle::kHermes3},
      {.name = "qwen3-instruct",
       .sources = {sources::qwen3_instruct()},
       .system = im,
       .user = im,
       .assistant = im,
       .prompt = "<|im_start|>assistant\n",
       .tools = ToolStyle::kHermes3},
      {.name = "mistral",
       .sources = {sources::mistral_v1()},
       .begin = "{bos}",
       .system = before_user,
       .user = turn(" [INST] ", " [/INST]"),
       .assistant = {.lead = " ", .end = "{eos}"},
       .system_place = kFirstUser,
       .alternates = true},
      {.name = "mistral",
       .sources = {sources::mistral_first("")},
       .begin = "{bos}",
       .user = inst,
       .assistant = {.end = "{eos}"},
       .system_place = kRefused,
       .alternates = true},
      {.name = "mistral",
       .sources = {sources::mistral_first(" + ' '")},
       .begin = "{bos}",
       .user = inst,
       .assistant = {.end = "{eos}", .behind = " "},
       .system_place = kRefused,
       .alternates = true},
      {.name = "mistral-v3",
       .sources = {sources::mistral_v3("[INST] ", "' ' + message['content'] | trim")},
       .begin = "{bos}",
       .system = before_user,
       .user = turn("[INST] ", "[/INST]"),
       .assistant = {.lead = " ", .end = "{eos}", .trim = true},
       .system_place = kLastUser,
       .alternates = true},
      {.name = "mistral-v3-tekken",
       .sources = {sources::mistral_v3("[INST]", "message['content']")},
       .begin = "{bos}",
       .system = before_user,
       .user = turn("[INST]", "[/INST]"),
       .assistant = {.end = "{eos}"},
       .system_place = kLastUser,
       .alternates = true},
      {.name = "gemma",
       .sources = {sources::gemma()},
       .begin = "{bos}",
       .user = gemma_user,
       .assistant = gemma_model,
       .prompt = "<start_of_turn>model\n",
       .system_place = kRefused,
       .alternates = true},
      {.name = "gemma3",
       .sources = {sources::gemma3()},
       .begin = "{bos}",
       .system = before_user,
       .user = gemma_user,
       .assistant = gemma_model,
       .prompt = "<start_of_turn>model\n",
       .system_place = kFirstUser,
       .alternates = true,
       .trims_parts = true},
      {.name = "phi3",
       .sources = {sources::phi3("")},
       .system = line,
       .user = line,
       .assistant = line,
       .prompt = "<|assistant|>\n",
       .ending = "{eos}"},
      {.name = "phi3",
       .sources = {sources::phi3(" and message['content']")},
       .system = line,
       .user = line,
       .assistant = line,
       .prompt = "<|assistant|>\n",
       .ending = "{eos}",
       .skips_empty_system = true},
      {.name = "phi3",
       .sources = {sources::phi3_small()},
       .begin = "{bos}",
       .system = line,
       .user = line,
       .assistant = line,
       .prompt = "<|assistant|>\n",
       .ending = "{eos}",
       .any_role = true},
      {.name = "phi3",
       .sources = {sources::phi3_pairs(false)},
       .user = turn("<|user|>\n", "<|end|>\n<|assistant|>\n"),
       .assistant = {.end = "<|end|>", .behind = "\n"},
       .system_place = kRefused},
      {.name = "phi3",
       .sources = {sources::phi3_pairs(true)},
       .begin = "{bos}",
       .user = turn("<|user|>\n", "<|end|>\n<|assistant|>\n"),
       .assistant = {.end = "<|end|>", .behind = "\n"},
       .system_place = kRefused},
      {.name = "phi4",
       .sources = {sources::phi4()},
       .system = phi4,
       .user = phi4,
       .assistant = phi4,
       .prompt = "<|im_start|>assistant<|im_sep|>"},
      {.name = "phi4",
       .sources = {sources::phi4_pairs()},
       .system = phi4,
       .user = turn("<|im_start|>user<|im_sep|>", "<|im_end|><|im_start|>assistant<|im_sep|>"),
       .assistant = {.end = "<|im_end|>"}},
      {.name = "phi4-mini",
       .sources = {sources::phi4_mini()},
       .system = phi4_mini,
       .user = phi4_mini,
       .assistant = phi4_mini,
       .prompt = "<|assistant|>",
       .ending = "{eos}",
       .any_role = true},
      {.name = "zephyr",
       .sources = {sources::zephyr()},
       .system = zephyr,
       .user = zephyr,
       .assistant = zephyr,
       .prompt = "<|assistant|>\n"},
      {.name = "alpaca",
       .sources = {sources::alpaca()},
       .begin = "{bos}",
       .system = turn("", "\n\n", "", true),
       .user = turn("### Instruction:\n", "\n\n", "", true),
       .assistant = turn("### Response:\n", "{eos}", "\n\n", true),
       .prompt = "### Response:\n",
       .alternates = true},
      {.name = "alpaca",
       .sources = {sources::alpaca_introduced()},
       .begin = "{bos}",
       .system = before_user,
       .user = turn("### Instruction:\n", "\n\n"),
       .assistant = turn("### Response:\n", "{eos}", "\n\n"),
       .prompt = "### Response:\n",
       .one_system = true},
  };
  return forms;
}

}  // namespace

std::span<const ChatForm> chat_forms() {
  static const std::vector<ChatForm> forms = make_forms();
  return forms;
}

std::span<const std::string_view> chat_form_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> out;
    for (const ChatForm& form : chat_forms()) {
      if (std::find(out.begin(), out.end(), form.name) == out.end()) out.push_back(form.name);
    }
    return out;
  }();
  return names;
}

}  // namespace qlorapp
