// SPDX-License-Identifier: Apache-2.0
/// The text of a conversation in the built-in templates, and where its messages lie in it.
#include "qlorapp/text/chat_template.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "text/examples.hpp"

using namespace qlorapp;

namespace {

const std::vector<Message> kTalk{
    {"system", " Be brief. "}, {"user", " Hi "}, {"assistant", " Hello! "}, {"user", "Bye"}, {"assistant", "See you."}};

std::span<const Message> talk_without_system() { return std::span(kTalk).subspan(1); }

ChatTemplate chat_named(std::string_view name) { return ChatTemplate::named(name, "<s>", "</s>"); }

std::string chat_text(std::string_view name, std::span<const Message> messages, const ChatOptions& options = {}) {
  return chat_named(name).render(messages, options).text;
}

std::string chat_refusal(std::string_view name, std::span<const Message> messages) {
  return thrown<ValueError>([&] { (void)chat_named(name).render(messages); });
}

/// The assistant's turns, which the model learns.
std::vector<std::string> chat_answers(std::string_view name, std::span<const Message> messages) {
  std::vector<std::string> answers;
  const RenderedChat chat = chat_named(name).render(messages);
  for (const Turn& turn : chat.turns) {
    if (turn.role == "assistant") answers.push_back(chat.text.substr(turn.begin, turn.end - turn.begin));
  }
  return answers;
}

}  // namespace

TEST_CASE("llama3 writes each message trimmed, between its header and <|eot_id|>", "[text][cpu]") {
  CHECK(chat_text("llama3", kTalk) ==
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nSee you.<|eot_id|>");
  CHECK(chat_answers("llama3", kTalk) == std::vector<std::string>{"Hello!<|eot_id|>", "See you.<|eot_id|>"});
  CHECK(chat_named("llama3").end_of_turn() == "<|eot_id|>");
}

TEST_CASE("chatml writes messages as they are, and the line feed behind a turn is not the model's", "[text][cpu]") {
  CHECK(chat_text("chatml", kTalk) ==
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        "<|im_start|>assistant\n Hello! <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\nSee you.<|im_end|>\n");
  CHECK(chat_answers("chatml", kTalk) == std::vector<std::string>{" Hello! <|im_end|>", "See you.<|im_end|>"});
}

TEST_CASE("llama2 writes the system message into the first user message, and spaces around an answer", "[text][cpu]") {
  CHECK(chat_text("llama2", kTalk) ==
        "<s>[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n Hi [/INST] Hello! </s><s>[INST] Bye [/INST] See you. </s>");
  CHECK(chat_answers("llama2", kTalk) == std::vector<std::string>{" Hello! </s>", " See you. </s>"});
  const RenderedChat chat = chat_named("llama2").render(kTalk);
  REQUIRE(chat.turns.size() == 5);
  CHECK(chat.turns[0].role == "system");
  const TextRange system = chat.turns[0].content, user = chat.turns[1].content, answer = chat.turns[2].content;
  CHECK(chat.text.substr(system.begin, system.end - system.begin) == " Be brief. ");
  CHECK(chat.text.substr(user.begin, user.end - user.begin) == " Hi");
  CHECK(chat.text.substr(answer.begin, answer.end - answer.begin) == "Hello!");
}

TEST_CASE("mistral-v3 writes the system message into the last message, and only if that is the user's", "[text][cpu]") {
  CHECK(chat_text("mistral-v3-tekken", std::span(kTalk).first(4)) ==
        "<s>[INST] Hi [/INST] Hello! </s>[INST] Be brief. \n\nBye[/INST]");
  CHECK(chat_text("mistral-v3-tekken", kTalk) == "<s>[INST] Hi [/INST] Hello! </s>[INST]Bye[/INST]See you.</s>");
}

TEST_CASE("a template with a system message of its own writes it only where none is given", "[text][cpu]") {
  const std::vector<Message> hi{{"user", "Hi"}}, told{{"system", ""}, {"user", "Hi"}};
  const std::string rest = "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
  CHECK(chat_text("qwen2.5", hi) ==
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant." + rest);
  CHECK(chat_text("qwen2.5", told) == "<|im_start|>system\n" + rest);
  CHECK(chat_named("qwen2.5").render(hi).turns.size() == 1);
}

TEST_CASE("the date of llama3.1 is the templates' own unless another one is given", "[text][cpu]") {
  const std::vector<Message> hi{{"user", "Hi"}};
  CHECK(has(chat_text("llama3.1", hi), "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"));
  CHECK(has(chat_text("llama3.1", hi, {.date_string = "01 Jan 2026"}), "Today Date: 01 Jan 2026\n\n<|eot_id|>"));
}

TEST_CASE("qwen3 drops the thoughts of answers before the last question and keeps those behind it", "[text][cpu]") {
  const std::vector<Message> talk{{"user", "1+1"},
                                  {"assistant", "<think>\nadd\n</think>\n\n2"},
                                  {"user", "2+2"},
                                  {"assistant", "<think>\ndouble\n</think>\n\n4"}};
  CHECK(chat_answers("qwen3", talk) == std::vector<std::string>{"2<|im_end|>", "<think>\ndouble\n</think>\n\n4<|im_end|>"});
}

TEST_CASE("an answer begins where generation would begin, and ends with the end of the turn, in every template", "[text][cpu]") {
  const std::span<const Message> talk = talk_without_system();
  REQUIRE(ChatTemplate::names().size() >= 15);
  for (const std::string_view name : ChatTemplate::names()) {
    INFO(name);
    const ChatTemplate chat = chat_named(name);
    const RenderedChat whole = chat.render(talk);
    REQUIRE(whole.turns.size() == talk.size());
    for (size_t i = 1; i < talk.size(); i += 2) {
      // DeepSeek's distills open a thought that only an answer as it is served stands behind.
      const RenderedChat shown = name == "deepseek-r1-distill" ? chat.render(talk.first(i + 1), {.served = true}) : whole;
      const Turn& turn = shown.turns[i];
      CHECK(turn.role == "assistant");
      CHECK(shown.text.substr(0, turn.begin) == chat.render(talk.first(i), {.add_generation_prompt = true}).text);
      CHECK(shown.text.substr(turn.begin, turn.end - turn.begin).ends_with(chat.end_of_turn()));
      CHECK(has(shown.text.substr(turn.content.begin, turn.content.end - turn.content.begin), i == 1 ? "Hello!" : "See you."));
      CHECK(turn.begin <= turn.content.begin);
      CHECK(turn.content.end + chat.end_of_turn().size() <= turn.end);
    }
  }
}

TEST_CASE("a role that the template does not know is refused by name, with the nearest one", "[text][cpu]") {
  const std::vector<Message> typo{{"user", "Hi"}, {"asistant", "Hello!"}};
  const std::string error = chat_refusal("phi4", typo);
  CHECK(has(error, "[chat_template] a role must be one of [system, user, assistant] in phi4; got 'asistant'"));
  CHECK(has(error, "Did you mean 'assistant'?"));
  const std::vector<Message> result{{"user", "Hi"}, {"tool", "42"}};
  CHECK(has(chat_refusal("phi4", result), "got 'tool'"));
  CHECK(has(chat_text("llama3", result), "<|start_header_id|>tool<|end_header_id|>\n\n42<|eot_id|>"));
}

TEST_CASE("a conversation that the template would raise for is refused by the number of the message", "[text][cpu]") {
  const std::vector<Message> twice{{"user", "Hi"}, {"user", "Hello?"}};
  for (const char* name : {"llama2", "mistral", "gemma", "alpaca"}) {
    CHECK(has(chat_refusal(name, twice), "user and assistant must alternate, the user first; message 1 has role 'user'"));
  }
  CHECK(has(chat_refusal("gemma", kTalk), "gemma does not support a system message"));
  CHECK(has(chat_refusal("gemma3", std::span(kTalk).first(1)), "the conversation has no user message"));
  CHECK(has(chat_refusal("llama3", {}), "a conversation must have a message"));
  const auto with_tools = [&] { (void)chat_text("zephyr", talk_without_system(), {.tools = "[{}]"}); };
  CHECK(has(thrown<ValueError>(with_tools), "zephyr does not write tools, so they would be lost"));
}

TEST_CASE("a template is known by its statements and refused if it differs in one character", "[text][cpu]") {
  const std::string source =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
      "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
  const auto from = [](std::string jinja, std::string_view old = {}, std::string_view now = {}) {
    if (!old.empty()) jinja.replace(jinja.find(old), old.size(), now);
    return ChatTemplate::from_source(jinja, "<s>", "</s>", "folder/chat_template.jinja");
  };
  CHECK(from(source).name() == "chatml");
  CHECK(from(source, "message['role']", "message.role").render(kTalk).text == chat_text("chatml", kTalk));
  CHECK(from(source, "{% for message in messages %}", "{%- for message in messages -%}\n  ").name() == "chatml");
  const std::string error = thrown<FormatError>([&] { (void)from(source, "<|im_end|>", "<|im_end|> "); });
  CHECK(has(error, "[folder/chat_template.jinja] the chat template must be one of ["));
}

TEST_CASE("a folder's template is read with its tokens; a name that is none of the list is refused", "[text][cpu]") {
  const std::optional<ChatTemplate> found = ChatTemplate::from_folder(example_file("tiny-llama"));
  REQUIRE(found.has_value());
  CHECK(found->name() == "llama3");
  CHECK(found->render(kTalk).text.starts_with("<|begin_of_text|><|start_header_id|>system"));
  const TemporaryFolder folder;
  CHECK_FALSE(ChatTemplate::from_folder(folder.path()).has_value());
  const std::string config = folder.path() + "/tokenizer_config.json";
  CHECK(has(thrown<FormatError>([&] { (void)ChatTemplate::choose("zephyr", folder.path()); }), config + "] tokenizer_config.json"));
  (void)folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<end>"}})");
  CHECK(ChatTemplate::choose("zephyr", folder.path()).end_of_turn() == "<end>");
  CHECK(has(thrown<ValueError>([&] { (void)chat_named("llama33"); }), "got 'llama33'. Did you mean 'llama3'?"));
}
