// SPDX-License-Identifier: Apache-2.0
/// One message of a row: the text that a template gets, and what its keys say about training. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "qlorapp/text/chat_template.hpp"
#include "text/json_reading.hpp"

namespace qlorapp {

struct RowMessage {
  Message message;
  std::optional<bool> trained;  ///< What its flag says; unset: it has none.
  std::string flag;             ///< The flag's key; empty: none.
};

/// Reads {"role", "content", …}. Keys that are null are no keys. A message with tool calls needs no content.
///
/// Content is a string, or a list of {"type": "text", "text"} (also input_text and output_text, as OpenAI names them).
/// A flag of the kinds that training programs write (weight, train, training, trainable, train_on_turn, loss, loss_mask, step_loss_mask,
/// and masked, which says the opposite) says whether the message is trained; templates do not get it.
/// @throws FormatError "[where] …" for content of another kind, for flags that are not 0, 1, true or false, and for flags of parts.
[[nodiscard]] RowMessage read_message(const Row& entry, const std::string& where);

/// Whether a key of an assistant's message holds thoughts.
[[nodiscard]] bool holds_thoughts(std::string_view key);

}  // namespace qlorapp
