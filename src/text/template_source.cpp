// SPDX-License-Identifier: Apache-2.0
#include "template_source.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <initializer_list>
#include <utility>

#include "template_branches.hpp"

namespace qlorapp {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_blank_in_line(char c) { return c == ' ' || c == '\t'; }
bool is_space(char c) { return is_blank_in_line(c) || c == '\n' || c == '\r'; }

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
using TemplateTokens = std::vector<std::string>;

std::optional<TemplateTokens> tokens_of(std::string_view code) {
  TemplateTokens out;
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
  TemplateTokens same;
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

/// The tokens from `i` on are those, in order.
bool are(const TemplateTokens& tokens, std::size_t i, std::initializer_list<std::string_view> wanted) {
  return i + wanted.size() <= tokens.size() &&
         std::equal(wanted.begin(), wanted.end(), tokens.begin() + static_cast<std::ptrdiff_t>(i));
}

/// x.strip() is x | trim, if (x) is if x, and the words of an exception do not matter.
TemplateTokens in_one_spelling(const TemplateTokens& tokens) {
  TemplateTokens out;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (are(tokens, i, {".", "strip", "(", ")"})) {
      out.insert(out.end(), {"|", "trim"});
      i += 3;
    } else if (are(tokens, i, {"raise_exception", "("}) && i + 3 < tokens.size() && tokens[i + 2][0] == '"' &&
               tokens[i + 3] == ")") {
      out.emplace_back("raise_exception");
      i += 3;
    } else {
      out.push_back(tokens[i]);
    }
  }
  const bool condition = out.size() > 3 && (out[0] == "if" || out[0] == "elif") && out[1] == "(" && out.back() == ")";
  int depth = 0;
  bool one_pair = condition;
  for (std::size_t i = 1; condition && i + 1 < out.size(); ++i) {
    depth += out[i] == "(" ? 1 : out[i] == ")" ? -1 : 0;
    one_pair = one_pair && depth > 0;
  }
  if (one_pair) {
    out.erase(out.begin() + 1);
    out.pop_back();
  }
  return out;
}

std::string joined_tokens(const TemplateTokens& tokens) {
  std::string out;
  for (const std::string& token : tokens) {
    if (!out.empty()) out += ' ';
    out += token;
  }
  return out;
}

/// An emitted sum is emitted term by term.
void emit_terms(const TemplateTokens& tokens, std::vector<std::string>& out) {
  TemplateTokens term;
  int depth = 0;
  const auto flush = [&] {
    out.push_back("emit " + joined_tokens(term));
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
    while (i > 0 && is_blank_in_line(text[i - 1])) --i;
    if (i > 0 ? text[i - 1] == '\n' : previous == nullptr) text = text.substr(0, i);
  }
  return text;
}

std::optional<Statements> all_statements(std::string_view source) {
  Statements out;
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
      if (block->kind == '{') emit_terms(in_one_spelling(*tokens), out);
      else out.push_back(joined_tokens(in_one_spelling(*tokens)));
    }
    at = block->end;
    previous = block;
  }
}

/// Neighboring texts become one.
Statements merged(const Statements& statements) {
  Statements out;
  for (const std::string& statement : statements) {
    if (!out.empty() && is_text(out.back()) && is_text(statement)) {
      out.back().pop_back();
      out.back() += statement.substr(6);
    } else {
      out.push_back(statement);
    }
  }
  return out;
}

}  // namespace

bool names_key(std::string_view jinja, std::string_view key) {
  for (std::size_t at = jinja.find(key); at != std::string_view::npos; at = jinja.find(key, at + 1)) {
    const char before = at > 0 ? jinja[at - 1] : ' ', behind = at + key.size() < jinja.size() ? jinja[at + key.size()] : ' ';
    if (before == '.' ? !is_name(behind) : (before == '\'' || before == '"') && behind == before) return true;
  }
  return false;
}

std::optional<TemplateStatements> template_statements(std::string_view jinja) {
  auto all = all_statements(jinja);
  if (all) all = without_builtin_tools(std::move(*all));
  if (!all) return std::nullopt;
  const auto plain = without_tools(*all);
  if (!plain) return std::nullopt;
  return TemplateStatements{merged(*all), merged(*plain)};
}

}  // namespace qlorapp
