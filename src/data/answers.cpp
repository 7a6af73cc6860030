// SPDX-License-Identifier: Apache-2.0
#include "answers.hpp"

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "core/check.hpp"

namespace qlorapp {
namespace {

constexpr std::size_t kMostRendered = std::size_t{1} << 30;

/// An answer as it is served: a hash of the text through its end, and where it stands.
struct ServedAnswer {
  std::size_t message, end, hash;
  std::vector<TextRange> ranges;
};

class Conversation {
 public:
  Conversation(TextTools& tools, std::span<const Message> messages, const ChatOptions& options)
      : tools_(tools), messages_(messages), options_(options) {
    options_.turns = true;
  }

  RenderedChat render(std::size_t count) {
    options_.served = messages_[count - 1].role == "assistant";
    RenderedChat chat = tools_.render(messages_.first(count), options_);
    rendered_ += chat.text.size();
    QLORAPP_CHECK_VALUE(rendered_ <= kMostRendered,
                        "[chat_template] a template may rewrite earlier turns, so each answer is rendered with what stands before "
                        "it; of {} messages that is more than {} bytes. Split the conversation.",
                        messages_.size(), kMostRendered);
    return chat;
  }

  static ServedAnswer served(const RenderedChat& chat, std::size_t message) {
    ServedAnswer out{message, 0, 0, chat.turns};
    QLORAPP_CHECK_VALUE(!out.ranges.empty(),
                        "[chat_template] the template must write the assistant's message {}; it does not. Remove the message.",
                        message);
    out.end = out.ranges.back().end;
    out.hash = std::hash<std::string_view>{}(std::string_view(chat.text).substr(0, out.end));
    return out;
  }

 private:
  TextTools& tools_;
  std::span<const Message> messages_;
  ChatOptions options_;
  std::size_t rendered_ = 0;
};

bool holds(const std::string& text, const ServedAnswer& answer) {
  return text.size() >= answer.end && std::hash<std::string_view>{}(std::string_view(text).substr(0, answer.end)) == answer.hash;
}

}  // namespace

std::vector<TrainedText> trained_texts(TextTools& tools, std::span<const Message> messages, const std::vector<bool>& wanted,
                                       const ChatOptions& options) {
  Conversation conversation(tools, messages, options);
  RenderedChat whole = conversation.render(messages.size());
  std::vector<ServedAnswer> open;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (wanted[i]) open.push_back(Conversation::served(i + 1 == messages.size() ? whole : conversation.render(i + 1), i));
  }
  if (open.empty()) {
    std::vector<TrainedText> out;
    out.push_back({std::move(whole.text), {}, messages.size()});
    return out;
  }
  std::vector<TrainedText> out;
  const auto is_whole = [&] { return std::all_of(open.begin(), open.end(), [&](const auto& a) { return holds(whole.text, a); }); };
  for (bool first = true; !open.empty(); first = false) {
    TrainedText sample;
    if (first && is_whole()) {
      sample = {std::move(whole.text), {}, messages.size()};
    } else {
      const std::size_t count = open.back().message + 1;
      sample = {conversation.render(count).text, {}, count};
    }
    std::vector<ServedAnswer> left;
    for (ServedAnswer& answer : open) {
      if (!holds(sample.text, answer)) left.push_back(std::move(answer));
      else sample.trained.insert(sample.trained.end(), answer.ranges.begin(), answer.ranges.end());
    }
    QLORAPP_CHECK_VALUE(left.size() < open.size(),
                        "[chat_template] the template must write the same text each time; it did not. Check it for the time or for "
                        "random numbers.");
    open = std::move(left);
    out.push_back(std::move(sample));
  }
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace qlorapp
