// SPDX-License-Identifier: Apache-2.0
/// The texts that train the answers of a conversation, each as a server would render it. Torch-free.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "qlorapp/text/text_tools.hpp"

namespace qlorapp {

struct TrainedText {
  std::string text;
  std::vector<TextRange> trained;  ///< Sorted and disjoint.
  std::size_t messages = 0;        ///< It holds that many of the first messages.
};

/// One text that trains all wanted answers, where the template writes each of them, and what stands before it, as it does while the
/// answer is the last message. A template that rewrites earlier turns (Qwen3 removes their thoughts) gives several: one for each answer
/// that the texts behind it do not hold in that form.
/// @param wanted  one for each message; true for messages of the assistant that are trained.
/// @returns the texts in the order of their answers; the whole conversation if no message is wanted.
/// @throws ValueError as TextTools::render(), and for a conversation whose texts together have more than 1 GiB.
[[nodiscard]] std::vector<TrainedText> trained_texts(TextTools& tools, std::span<const Message> messages,
                                                     const std::vector<bool>& wanted, const ChatOptions& options);

}  // namespace qlorapp
