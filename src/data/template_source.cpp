// SPDX-License-Identifier: Apache-2.0
#include "template_source.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

namespace qlorapp {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_blank(char c) { return c == ' ' || c == '\t'; }
bool is_space(char c) { return is_blank(c) || c == '\n' || c == '\r'; }

/// One spelling of a string, from which the value can be read back.
std::string spelled(std::string_view value) {
  std::string out = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out += '"';
}

/// A token of an expression: a string in that spelling, a name or number, or punctuation.
using Tokens = std::vector<std::string>;

std::optional<Tokens> tokens_of(std::string_view code) {
  Tokens out;
  for (std::size_t i = 0; i < code.size();) {
    const char c = code[i];
    if (is_space(c)) {
      ++i;
    } else if (c == '\'' || c == '"') {
      std::string value;
      for (++i; i < code.size() && code[i] != c; ++i) {
        if (code[i] != '\\') {
          value += code[i];
          continue;
        }
        if (++i == code.size()) return std::nullopt;
        switch (code[i]) {
          case 'n':
            value += '\n';
            break;
          case 't':
            value += '\t';
            break;
          case 'r':
            value += '\r';
            break;
          case '\\':
          case '\'':
          case '"':
            value += code[i];
            break;
          default:
            return std::nullopt;
        }
      }
      if (i == code.size()) return std::nullopt;
      ++i;
      out.push_back(spelled(value));
    } else if (is_name(c)) {
      const std::size_t begin = i;
      while (i < code.size() && is_name(code[i])) ++i;
      out.emplace_back(code.substr(begin, i - begin));
    } else {
      const bool two = i + 1 < code.size() && code[i + 1] == '=' && (c == '=' || c == '!' || c == '<' || c == '>');
      out.emplace_back(code.substr(i, two ? 2 : 1));
      i += two ? 2 : 1;
    }
  }
  // x['name'] and x.name are one thing.
  Tokens same;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool key = i > 0 && i + 2 < out.size() && out[i] == "[" && out[i + 2] == "]" && out[i + 1].size() > 2 &&
                     out[i + 1][0] == '"' && (is_name(out[i - 1].back()) || out[i - 1] == "]") && out[i - 1][0] != '"' &&
                     std::all_of(out[i + 1].begin() + 1, out[i + 1].end() - 1, is_name);
    if (!key) {
      same.push_back(out[i]);
      continue;
    }
    same.emplace_back(".");
    same.push_back(out[i + 1].substr(1, out[i + 1].size() - 2));
    i += 2;
  }
  return same;
}

std::string joined(const Tokens& tokens) {
  std::string out;
  for (const std::string& token : tokens) {
    if (!out.empty()) out += ' ';
    out += token;
  }
  return out;
}

/// An emitted sum is emitted term by term.
void emit_terms(const Tokens& tokens, std::vector<std::string>& out) {
  Tokens term;
  int depth = 0;
  const auto flush = [&] {
    out.push_back("emit " + joined(term));
    term.clear();
  };
  for (const std::string& token : tokens) {
    if (token == "(" || token == "[" || token == "{") ++depth;
    if (token == ")" || token == "]" || token == "}") --depth;
    if (token == "+" && depth == 0) flush();
    else term.push_back(token);
  }
  flush();
}

/// Emits one string and nothing else.
bool is_text(const std::string& statement) {
  if (!statement.starts_with("emit \"")) return false;
  std::size_t i = 6;
  while (i < statement.size() && statement[i] != '"') i += statement[i] == '\\' ? 2 : 1;
  return i + 1 == statement.size();
}

struct Block {
  char kind;  ///< { output, % statement, # comment
  std::size_t begin, end;
  std::string_view code;
  bool strip_before, strip_after;
};

std::optional<Block> next_block(std::string_view source, std::size_t from) {
  std::size_t i = source.find('{', from);
  while (i != std::string_view::npos &&
         (i + 1 >= source.size() || std::string_view("{%#").find(source[i + 1]) == std::string_view::npos)) {
    i = source.find('{', i + 1);
  }
  if (i == std::string_view::npos) return Block{0, source.size(), source.size(), {}, false, false};
  const char kind = source[i + 1];
  const std::string_view close = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
  std::size_t end = i + 2;
  for (char quote = 0; end < source.size(); ++end) {  // a string may contain the closing mark
    if (quote != 0) {
      if (source[end] == '\\') ++end;
      else if (source[end] == quote) quote = 0;
    } else if (kind != '#' && (source[end] == '\'' || source[end] == '"')) {
      quote = source[end];
    } else if (source.substr(end, 2) == close) {
      break;
    }
  }
  if (end + 2 > source.size()) return std::nullopt;
  std::string_view code = source.substr(i + 2, end - i - 2);
  const bool before = code.starts_with('-'), after = code.size() > (before ? 1u : 0u) && code.ends_with('-');
  if (before) code.remove_prefix(1);
  if (after) code.remove_suffix(1);
  return Block{kind, i, end + 2, code, before, after};
}

/// The text between two blocks as Jinja would write it.
std::string_view effective_text(std::string_view text, const Block* previous, const Block& next) {
  if (previous != nullptr && previous->strip_after) {
    while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  } else if (previous != nullptr && previous->kind != '{' && text.starts_with('\n')) {
    text.remove_prefix(1);  // trim_blocks
  }
  if (next.kind == 0) {
    if (text.ends_with('\n')) text.remove_suffix(1);  // keep_trailing_newline is off
  } else if (next.strip_before) {
    while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  } else if (next.kind != '{') {  // lstrip_blocks
    std::size_t i = text.size();
    while (i > 0 && is_blank(text[i - 1])) --i;
    if (i > 0 ? text[i - 1] == '\n' : previous == nullptr) text = text.substr(0, i);
  }
  return text;
}

std::optional<std::vector<std::string>> all_statements(std::string_view source) {
  std::vector<std::string> out;
  std::optional<Block> previous;
  for (std::size_t at = 0;;) {
    const auto block = next_block(source, at);
    if (!block) return std::nullopt;
    const auto text = effective_text(source.substr(at, block->begin - at), previous ? &*previous : nullptr, *block);
    if (!text.empty()) out.push_back("emit " + spelled(text));
    if (block->kind == 0) return out;
    if (block->kind != '#') {
      const auto tokens = tokens_of(block->code);
      if (!tokens || tokens->empty()) return std::nullopt;
      if (block->kind == '{') emit_terms(*tokens, out);
      else out.push_back(joined(*tokens));
    }
    at = block->end;
    previous = block;
  }
}

/// What a conversation without tools does not need: a condition and its only body. An empty body stands for any, because the
/// condition is then false.
constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kOnlyWithTools{{
    {"if custom_tools is defined", ""},
    {"if builtin_tools is defined", ""},
    {"if tools is not none", ""},
    {"if builtin_tools is defined or tools is not none", ""},
    {"if tools is not none and not tools_in_user_message", ""},
    {"if tools_in_user_message and not tools is none", ""},
    {"if not tools is defined", "set tools = none"},
    {"if not tools_in_user_message is defined", "set tools_in_user_message = true"},
    {"if not tools_in_user_message is defined", "set tools_in_user_message = false"},
    {"if not add_generation_prompt is defined", "set add_generation_prompt = false"},
    {"if add_generation_prompt is not defined", "set add_generation_prompt = false"},
}};
/// True for every message that is rendered here: its branch stays, the others go.
constexpr std::string_view kOrdinaryMessage =
    R"(if not ( message . role == "ipython" or message . role == "tool" or "tool_calls" in message ))";

/// @returns the index of the endif, or of the first elif or else, that belongs to the `if` at `i`; the size when there is none.
std::size_t next_branch(const std::vector<std::string>& s, std::size_t i, bool only_end) {
  int depth = 0;
  for (++i; i < s.size(); ++i) {
    if (s[i].starts_with("if ")) ++depth;
    const bool end = s[i] == "endif";
    if (depth == 0 && (end || (!only_end && (s[i] == "else" || s[i].starts_with("elif "))))) return i;
    if (end) --depth;
  }
  return i;
}

std::optional<std::vector<std::string>> without_tools(const std::vector<std::string>& s) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < s.size(); ++i) {
    const auto is_tool = [&](const auto& entry) {
      return entry.first == s[i] && (entry.second.empty() || (i + 2 < s.size() && s[i + 1] == entry.second && s[i + 2] == "endif"));
    };
    const bool tools = std::any_of(kOnlyWithTools.begin(), kOnlyWithTools.end(), is_tool);
    if (!tools && s[i] != kOrdinaryMessage) {
      out.push_back(s[i]);
      continue;
    }
    const std::size_t branch = next_branch(s, i, false), end = next_branch(s, i, true);
    if (end == s.size() || (tools && branch != end)) return std::nullopt;
    for (std::size_t k = i + 1; k < branch && !tools; ++k) {
      if (!s[k].starts_with("emit ")) return std::nullopt;
      out.push_back(s[k]);
    }
    i = end;
  }
  return out;
}

}  // namespace

std::optional<std::vector<std::string>> template_statements(std::string_view jinja) {
  auto all = all_statements(jinja);
  if (all) all = without_tools(*all);
  if (!all) return std::nullopt;
  std::vector<std::string> out;
  for (const std::string& statement : *all) {
    if (!out.empty() && is_text(out.back()) && is_text(statement)) {
      out.back().pop_back();
      out.back() += statement.substr(6);
      continue;
    }
    out.push_back(statement);
  }
  return out;
}

}  // namespace qlorapp
