// SPDX-License-Identifier: Apache-2.0
/// Which text of a conversation a template writes, whatever the template. Torch-free.
///
/// Each part of a message gets a mark in its middle, and the marked conversation is rendered: a part is written if its mark is there. So
/// trimming, escapes and the place of a part do not matter, nor whether its words occur elsewhere.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/text/chat_template.hpp"

namespace qlorapp {

/// A part of a conversation: a content, a piece of one in front of or behind a tag of thoughts, thoughts under a key of their own, the
/// name or an argument of a tool call, or a tool.
struct ChatPart {
  std::size_t message = 0;  ///< Its index; that of no message for a tool.
  std::string what;         ///< "content", "thoughts", the key of thoughts, "tool call", "tool".
  std::string text;
  bool written = false;
};

class MarkedChat {
 public:
  /// @param tools  a JSON array; empty: none.
  MarkedChat(std::span<const Message> messages, const std::string& tools);

  /// The marked conversation, to be rendered.
  [[nodiscard]] std::span<const Message> messages() const { return messages_; }
  [[nodiscard]] const std::string& tools() const { return tools_; }

  [[nodiscard]] const std::vector<ChatPart>& parts() const { return parts_; }
  /// Notes the parts that a rendered text holds.
  void look(std::string_view text);
  /// @returns whether a rendered text holds the part.
  [[nodiscard]] bool holds(std::string_view text, std::size_t part) const;

 private:
  [[nodiscard]] std::string mark_of(std::size_t part) const;
  /// The text with a mark in it; as it is if it is white space.
  std::string marked(std::string_view text, std::size_t message, std::string_view what);
  std::string marked_content(std::string_view content, std::size_t message);
  std::string marked_rest(const std::string& rest, std::size_t message);
  std::string marked_tools(const std::string& tools);

  std::string base_ = "qz";  ///< What marks begin with; the conversation does not contain it.
  std::vector<Message> messages_;
  std::string tools_;
  std::vector<ChatPart> parts_;
};

}  // namespace qlorapp
