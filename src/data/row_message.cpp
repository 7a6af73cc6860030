// SPDX-License-Identifier: Apache-2.0
#include "row_message.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.hpp"

namespace qlorapp {
namespace {

struct Flag {
  std::string_view key;
  bool masks = false;  ///< True says that the message is not trained.
};
/// OpenAI, Mistral and Together: weight. axolotl: train, training. verl: trainable, loss_mask. ms-swift and XTuner: loss. slime:
/// step_loss_mask. torchtune: masked.
constexpr std::array<Flag, 9> kFlags{{{"weight"},
                                      {"train"},
                                      {"training"},
                                      {"trainable"},
                                      {"train_on_turn"},
                                      {"loss"},
                                      {"loss_mask"},
                                      {"step_loss_mask"},
                                      {"masked", true}}};
constexpr std::array<std::string_view, 2> kFlagsOfCharacters{"train_detail", "training_detail"};
constexpr std::array<std::string_view, 5> kThoughts{"reasoning_content", "reasoning", "thinking", "thoughts", "thought"};
constexpr std::array<std::string_view, 3> kTextTypes{"text", "input_text", "output_text"};

bool is_in(std::string_view key, const auto& keys) { return std::find(keys.begin(), keys.end(), key) != keys.end(); }

const Flag* flag_named(std::string_view key) {
  const auto found = std::find_if(kFlags.begin(), kFlags.end(), [&](const Flag& flag) { return flag.key == key; });
  return found == kFlags.end() ? nullptr : &*found;
}

bool says_trained(const Flag& flag, const Row& value, const std::string& where) {
  const bool no = value == false || (value.is_number() && value == 0), yes = value == true || (value.is_number() && value == 1);
  QLORAPP_CHECK_FORMAT(no || yes, "[{}] '{}' of a message must be 0, 1, true or false; got {}. Correct or remove it.", where,
                       flag.key, value.is_number() ? value.dump() : std::string(kind_of(value)));
  return flag.masks ? no : yes;
}

std::string text_of_part(const Row& part, const std::string& where) {
  const bool has_type = part.is_object() && part.contains("type") && part["type"].is_string();
  const std::string type = has_type ? part["type"].get<std::string>() : std::string("text");
  QLORAPP_CHECK_FORMAT(part.is_object() && is_in(type, kTextTypes),
                       "[{}] a part of 'content' must be {{\"type\": \"text\", \"text\": …}}; got {}. Only text is trained: remove "
                       "the part if the text "
                       "does not refer to it, or the row.",
                       where, part.is_object() ? message("'{}'", type.substr(0, 64)) : std::string(kind_of(part)));
  for (const auto& [key, value] : part.items()) {
    QLORAPP_CHECK_FORMAT(
        value.is_null() || !flag_named(key),
        "[{}] flags of training must be keys of a message; got '{}' in a part of its content. Split the message, or "
        "remove the flag.",
        where, key);
  }
  return require_text(part, "text", where);
}

}  // namespace

bool holds_thoughts(std::string_view key) { return is_in(key, kThoughts); }

RowMessage read_message(const Row& entry, const std::string& where) {
  RowMessage out;
  Message& read = out.message;
  read.role = require_text(entry, "role", where);
  Row rest = Row::object();
  for (const auto& [key, value] : entry.items()) {
    if (key == "role" || key == "content" || value.is_null()) continue;
    QLORAPP_CHECK_FORMAT(!is_in(key, kFlagsOfCharacters) || value.empty(),
                         "[{}] a message is trained as a whole or not at all; got '{}'. Split the message, or remove the key.",
                         where, key);
    const Flag* flag = flag_named(key);
    if (flag == nullptr) {
      rest[key] = value;
      continue;
    }
    const bool trained = says_trained(*flag, value, where);
    QLORAPP_CHECK_FORMAT(!out.trained || *out.trained == trained,
                         "[{}] the flags of a message must agree; '{}' and '{}' do not. Remove one.", where, out.flag, key);
    out.trained = trained;
    out.flag = key;
  }
  const bool says_nothing = !entry.contains("content") || entry["content"].is_null();
  const auto calls = rest.find("tool_calls");
  QLORAPP_CHECK_FORMAT(!says_nothing || (calls != rest.end() && !calls->empty()),
                       "[{}] a message must have a 'content' or 'tool_calls'; got keys {}. Correct or remove the row.", where,
                       joined(keys_of(entry)));
  if (!says_nothing && entry["content"].is_array()) {
    for (const Row& part : entry["content"]) read.parts.push_back(text_of_part(part, where));
    read.content = joined_parts(read.parts);
  } else if (!says_nothing) {
    read.content = require_text(entry, "content", where);
  }
  if (!rest.empty()) read.rest = rest.dump();
  return out;
}

}  // namespace qlorapp
