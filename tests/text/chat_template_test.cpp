// SPDX-License-Identifier: Apache-2.0
/// The text of a conversation in the templates that have names, and where its answers stand.
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

/// What the model learns of each answer, as it is served.
std::vector<std::string> chat_answers(std::string_view name, std::span<const Message> messages) {
  std::vector<std::string> answers;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "assistant") continue;
    const RenderedChat chat = chat_named(name).render(messages.first(i + 1), {.served = true});
    for (const Turn& turn : chat.turns) answers.push_back(chat.text.substr(turn.begin, turn.end - turn.begin));
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
}

TEST_CASE("mistral-v3 writes the system message into the last message, and only if that is the user's", "[text][cpu]") {
  CHECK(chat_text("mistral-v3-tekken", std::span(kTalk).first(4)) ==
        "<s>[INST] Hi [/INST] Hello! </s>[INST] Be brief. \n\nBye[/INST]");
  CHECK(chat_text("mistral-v3-tekken", kTalk) == "<s>[INST] Hi [/INST] Hello! </s>[INST]Bye[/INST]See you.</s>");
  CHECK(chat_named("mistral-v3-tekken").render(kTalk, {.served = true}).text ==
        "<s>[INST] Hi [/INST] Hello! </s>[INST] Be brief. \n\nBye[/INST]See you.</s>");
  CHECK(chat_answers("mistral-v3", kTalk) == std::vector<std::string>{" Hello!</s>", " See you.</s>"});
}

TEST_CASE("a template with a system message of its own writes it only where none is given", "[text][cpu]") {
  const std::vector<Message> hi{{"user", "Hi"}}, told{{"system", ""}, {"user", "Hi"}};
  const std::string rest = "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
  CHECK(chat_text("qwen2.5", hi) ==
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant." + rest);
  CHECK(chat_text("qwen2.5", told) == "<|im_start|>system\n" + rest);
  CHECK(chat_named("qwen2.5").render(hi).turns.empty());
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
  CHECK(has(chat_text("qwen3", talk), "assistant\n2<|im_end|>\n"));
  CHECK(chat_answers("qwen3", talk) ==
        std::vector<std::string>{"<think>\nadd\n</think>\n\n2<|im_end|>", "<think>\ndouble\n</think>\n\n4<|im_end|>"});
}

TEST_CASE("an answer begins where generation would begin, and ends with the end of the turn, in every template", "[text][cpu]") {
  const std::span<const Message> talk = talk_without_system();
  REQUIRE(ChatTemplate::names().size() >= 15);
  for (const std::string_view name : ChatTemplate::names()) {
    INFO(name);
    const ChatTemplate chat = chat_named(name);
    const std::string end = chat.end_of_turn().value();
    for (size_t i = 1; i < talk.size(); i += 2) {
      const RenderedChat shown = chat.render(talk.first(i + 1), {.served = true});
      REQUIRE(shown.turns.size() == 1);
      const Turn turn = shown.turns.front();
      CHECK(shown.text.substr(0, turn.begin) == chat.render(talk.first(i), {.add_generation_prompt = true}).text);
      const std::string learned = shown.text.substr(turn.begin, turn.end - turn.begin);
      CHECK(learned.ends_with(end));
      CHECK(has(learned, i == 1 ? "Hello!" : "See you."));
    }
  }
}

TEST_CASE("a role that is misspelled is refused with the right one", "[text][cpu]") {
  const std::vector<Message> typo{{"user", "Hi"}, {"asistant", "Hello!"}};
  CHECK(has(chat_refusal("phi4", typo),
            "[chat_template] a role must be one of [system, user, assistant, tool, ipython], or one that the chat template names; "
            "got 'asistant'."));
  const std::vector<Message> result{{"user", "Hi"}, {"tool", "42"}};
  CHECK(has(chat_text("llama3", result), "<|start_header_id|>tool<|end_header_id|>\n\n42<|eot_id|>"));
}

TEST_CASE("a conversation that the template raises for is refused with its words", "[text][cpu]") {
  const std::vector<Message> twice{{"user", "Hi"}, {"user", "Hello?"}};
  for (const char* name : {"llama2", "mistral", "gemma", "alpaca"}) {
    CHECK(has(chat_refusal(name, twice),
              "[chat_template] the template refuses the conversation: user and assistant must alternate, the user first. Change or "
              "remove the row"));
  }
  CHECK(has(chat_refusal("gemma", kTalk), "a system message is not supported"));
  CHECK(has(chat_refusal("llama3", {}), "a conversation must have a message"));
}

TEST_CASE("a template of nobody is run as it is, and one that is not Jinja is refused by its line", "[text][cpu]") {
  const auto from = [](std::string_view jinja) {
    return ChatTemplate::from_source(jinja, {{"bos_token", "<s>"}, {"eos_token", "</s>"}}, "folder/chat_template.jinja");
  };
  const ChatTemplate chat = from(
      "{{ bos_token }}{% for m in messages %}({{ m.role | upper }}){{ m.content | trim }}{{ eos_token }}{% endfor %}"
      "{% if add_generation_prompt %}(ASSISTANT){% endif %}");
  const RenderedChat shown = chat.render(talk_without_system());
  CHECK(shown.text == "<s>(USER)Hi</s>(ASSISTANT)Hello!</s>(USER)Bye</s>(ASSISTANT)See you.</s>");
  REQUIRE(shown.turns.size() == 1);
  CHECK(shown.text.substr(shown.turns[0].begin, shown.turns[0].end - shown.turns[0].begin) == "See you.</s>");
  CHECK(chat.end_of_turn() == "</s>");
  CHECK(chat.reads_key("role"));
  CHECK_FALSE(chat.reads_key("tool_calls"));
  const std::string error = thrown<FormatError>([&] { (void)from("a\n{% if %}"); });
  CHECK(has(error, "[folder/chat_template.jinja] line 2: the chat template must be Jinja; got '' where a value must stand"));
}

TEST_CASE("a folder's template is read with its tokens; a name that is none of the list is refused", "[text][cpu]") {
  const std::optional<ChatTemplate> found = ChatTemplate::from_folder(example_file("tiny-llama"));
  REQUIRE(found.has_value());
  CHECK(found->render(kTalk).text.starts_with("<|begin_of_text|><|start_header_id|>system"));
  const TemporaryFolder folder;
  CHECK_FALSE(ChatTemplate::from_folder(folder.path()).has_value());
  const std::string config = folder.path() + "/tokenizer_config.json";
  CHECK(has(thrown<FormatError>([&] { (void)ChatTemplate::choose("zephyr", folder.path()); }), config + "] tokenizer_config.json"));
  (void)folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<end>"}})");
  CHECK(ChatTemplate::choose("zephyr", folder.path()).end_of_turn() == "<end>");
  CHECK(has(thrown<ValueError>([&] { (void)chat_named("llama33"); }), "got 'llama33'. Did you mean 'llama3'?"));
}
