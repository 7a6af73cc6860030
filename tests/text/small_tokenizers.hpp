// SPDX-License-Identifier: Apache-2.0
/// Two tokenizer.json whose ids can be worked out by hand.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace tiny {

using nlohmann::json;

/// GPT-2's spelling of a byte: printable Latin-1 stands for itself, the other 68 bytes are U+0100, U+0101, …
inline std::string tokenizer_spelling(int byte) {
  int code = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    if (b == byte) {
      if (printable) code = byte;
      break;
    }
    if (!printable) ++code;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

inline json tokenizer_added(int id, const char* content, bool special, bool lstrip = false) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", lstrip},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

/// <s> in front of the text and </s> behind it.
inline json tokenizer_template(int first, int last) {
  return {{"type", "TemplateProcessing"},
          {"single",
           {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
            {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
            {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}}},
          {"special_tokens", {{"<s>", {{"ids", {first}}}}, {"</s>", {{"ids", {last}}}}}}};
}

/// Byte b has id b. The merges by rank, with the id of what they make:
///   0  h e → he 256        1  l l → ll 257       2  he ll → hell 258     3  hell o → hello 259
///   4  Ġ hello → Ġhello 260                      5  e l → el 261         6  the first two bytes of U+1F600 → 262
inline json byte_level_tokenizer() {
  json vocabulary = json::object();
  for (int b = 0; b < 256; ++b) vocabulary[tokenizer_spelling(b)] = b;
  const std::vector<std::pair<std::string, std::string>> merges{{"h", "e"},     {"l", "l"}, {"he", "ll"}, {"hell", "o"},
                                                                {"Ġ", "hello"}, {"e", "l"}, {"ð", "Ł"}};
  for (size_t i = 0; i < merges.size(); ++i) vocabulary[merges[i].first + merges[i].second] = 256 + i;
  json file{{"version", "1.0"}, {"normalizer", nullptr}};
  file["added_tokens"] = {tokenizer_added(263, "<s>", true), tokenizer_added(264, "</s>", true),
                          tokenizer_added(265, "[tool]", false), tokenizer_added(266, "<mask>", true, /*lstrip=*/true)};
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  file["post_processor"] = tokenizer_template(263, 264);
  file["decoder"] = {{"type", "ByteLevel"}};
  file["model"] = {{"type", "BPE"}, {"vocab", std::move(vocabulary)}, {"merges", merges}};
  return file;
}

/// As Llama 2's: <unk> 0, <s> 1, </s> 2, byte b 3 + b, then ▁ 259, h 260, i 261, ▁h 262, ▁hi 263, é 264.
inline json character_tokenizer() {
  json vocabulary{{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  for (int b = 0; b < 256; ++b) {
    const char* const digits = "0123456789ABCDEF";
    vocabulary[std::string("<0x") + digits[b / 16] + digits[b % 16] + ">"] = 3 + b;
  }
  int next = 259;
  for (const char* token : {"▁", "h", "i", "▁h", "▁hi", "é"}) vocabulary[token] = next++;
  json file{{"version", "1.0"}, {"pre_tokenizer", nullptr}};
  file["added_tokens"] = {tokenizer_added(0, "<unk>", true), tokenizer_added(1, "<s>", true), tokenizer_added(2, "</s>", true)};
  file["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Prepend"}, {"prepend", "▁"}}, {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}}}};
  file["post_processor"] = tokenizer_template(1, 2);
  file["decoder"] = {{"type", "Sequence"},
                     {"decoders",
                      {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                       {{"type", "ByteFallback"}},
                       {{"type", "Fuse"}},
                       {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  file["model"] = {{"type", "BPE"},       {"unk_token", "<unk>"},
                   {"fuse_unk", true},    {"byte_fallback", true},
                   {"vocab", vocabulary}, {"merges", json::array({json::array({"▁", "h"}), json::array({"▁h", "i"})})}};
  return file;
}

}  // namespace tiny
