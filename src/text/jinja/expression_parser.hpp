// SPDX-License-Identifier: Apache-2.0
/// Expressions of Jinja, by its precedence. parser.cpp has it alone. Torch-free.
#pragma once

#include <algorithm>
#include <charconv>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "syntax.hpp"

namespace qlorapp::jinja {

class ExpressionParser {
 protected:
  static constexpr int kDeepest = 200;

  ExpressionParser(std::vector<Token> tokens, const std::string& where) : tokens_(std::move(tokens)), where_(where) {}
  ~ExpressionParser() = default;

  struct Level {
    explicit Level(ExpressionParser& parser) : parser_(parser) {
      if (++parser_.depth_ > kDeepest) parser_.fail("got more than 200 levels");
    }
    ~Level() { --parser_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    ExpressionParser& parser_;
  };

  /// Operators in a row, each of which stands in the next.
  struct Chain {
    explicit Chain(ExpressionParser& parser) : parser_(parser), before_(parser.depth_) {}
    ~Chain() { parser_.depth_ = before_; }
    Chain(const Chain&) = delete;
    Chain& operator=(const Chain&) = delete;
    void grow() {
      if (++parser_.depth_ > kDeepest) parser_.fail("got more than 200 levels");
    }
    ExpressionParser& parser_;
    int before_;
  };

  // --- tokens

  [[nodiscard]] const Token& token(std::size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  [[nodiscard]] bool sees(std::string_view text, std::size_t ahead = 0) const {
    return token(ahead).kind == TokenKind::kOperator && token(ahead).text == text;
  }
  [[nodiscard]] bool sees_word(std::string_view text, std::size_t ahead = 0) const {
    return token(ahead).kind == TokenKind::kName && token(ahead).text == text;
  }
  bool skip(std::string_view text) { return sees(text) && (++at_, true); }
  bool skip_word(std::string_view text) { return sees_word(text) && (++at_, true); }
  void expect(std::string_view text) {
    if (!skip(text)) fail(message("expected '{}' before '{}'", text, token().text));
  }
  void expect_word(std::string_view text) {
    if (!skip_word(text)) fail(message("expected '{}' before '{}'", text, token().text));
  }
  std::string name() {
    if (token().kind != TokenKind::kName) fail(message("expected a name before '{}'", token().text));
    return tokens_[at_++].text;
  }
  void end_block() {
    if (token().kind != TokenKind::kBlockEnd) fail(message("expected the end of the tag before '{}'", token().text));
    ++at_;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw FormatError(message("[{}] line {}: the chat template must be Jinja; {}. Copy the file from the model again.", where_,
                              token().line, what));
  }
  [[noreturn]] void refuse(const std::string& what) const {
    throw FormatError(message(
        "[{}] line {}: the chat template uses {}, which is not computed here. Choose another with --chat_template NAME or FILE.",
        where_, token().line, what));
  }

  template <class... Children>
  [[nodiscard]] std::unique_ptr<Node> node(Kind kind, Children... children) const {
    auto out = std::make_unique<Node>();
    out->kind = kind;
    out->line = token().line;
    (out->children.push_back(std::move(children)), ...);
    return out;
  }

  // --- expressions, from the loosest to the tightest

  /// Expressions with commas between them, which are a tuple; or one.
  NodePtr tuple(bool with_choice) {
    NodePtr first = with_choice ? expression() : either();
    if (!sees(",")) return first;
    auto out = node(Kind::kTuple, std::move(first));
    while (skip(",")) {
      if (token().kind == TokenKind::kBlockEnd || token().kind == TokenKind::kVariableEnd || sees(")") || sees("=")) break;
      out->children.push_back(with_choice ? expression() : either());
    }
    return out;
  }

  NodePtr expression() {
    Chain chain(*this);
    const Level level(*this);
    NodePtr value = either();
    while (skip_word("if")) {
      chain.grow();
      NodePtr condition = either();
      NodePtr other = skip_word("else") ? expression() : nullptr;
      value = node(Kind::kChoice, std::move(condition), std::move(value), std::move(other));
    }
    return value;
  }

  NodePtr either() {
    Chain chain(*this);
    NodePtr left = both();
    while (skip_word("or")) {
      chain.grow();
      left = node(Kind::kOr, std::move(left), both());
    }
    return left;
  }

  NodePtr both() {
    Chain chain(*this);
    NodePtr left = negation();
    while (skip_word("and")) {
      chain.grow();
      left = node(Kind::kAnd, std::move(left), negation());
    }
    return left;
  }

  NodePtr negation() {
    const Level level(*this);
    if (skip_word("not")) return node(Kind::kNot, negation());
    return comparison();
  }

  NodePtr comparison() {
    NodePtr first = sum();
    std::unique_ptr<Node> out;
    for (;;) {
      std::string op;
      for (const std::string_view one : {"==", "!=", ">=", "<=", ">", "<"}) {
        if (op.empty() && sees(one)) op = one;
      }
      if (!op.empty()) ++at_;
      else if (skip_word("in")) op = "in";
      else if (sees_word("not") && sees_word("in", 1)) {
        at_ += 2;
        op = "not in";
      } else {
        break;
      }
      if (!out) out = node(Kind::kCompare, std::move(first));
      out->names.push_back(op);
      out->children.push_back(sum());
    }
    if (out) return out;
    return first;
  }

  /// Jinja's Markup, which escapes what is added to it.
  static bool is_markup(const Node& value) {
    return value.kind == Kind::kFilter &&
           (value.name == "safe" || value.name == "e" || value.name == "escape" || value.name == "forceescape");
  }

  NodePtr sum() {
    Chain chain(*this);
    NodePtr left = joined_texts();
    while (sees("+") || sees("-")) {
      chain.grow();
      const bool adds = sees("+");
      ++at_;
      NodePtr right = joined_texts();
      if (adds && (is_markup(*left) || is_markup(*right))) refuse("'+' behind the filter 'safe', which would escape the rest");
      left = node(adds ? Kind::kAdd : Kind::kSubtract, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr joined_texts() {
    Chain chain(*this);
    NodePtr left = product();
    while (skip("~")) {
      chain.grow();
      left = node(Kind::kJoin, std::move(left), product());
    }
    return left;
  }

  NodePtr product() {
    Chain chain(*this);
    NodePtr left = power();
    for (;;) {
      const Kind kind = sees("*") ? Kind::kMultiply : sees("/") ? Kind::kDivide : sees("//") ? Kind::kFloorDivide : Kind::kModulo;
      if (kind == Kind::kModulo && !sees("%")) return left;
      chain.grow();
      ++at_;
      left = node(kind, std::move(left), power());
    }
  }

  NodePtr power() {
    Chain chain(*this);
    NodePtr left = signed_value(true);
    while (skip("**")) {
      chain.grow();
      left = node(Kind::kPower, std::move(left), signed_value(true));
    }
    return left;
  }

  NodePtr signed_value(bool with_filters) {
    const Level level(*this);
    NodePtr value;
    if (skip("-")) value = node(Kind::kNegative, signed_value(false));
    else if (skip("+")) value = node(Kind::kPositive, signed_value(false));
    else value = primary();
    value = postfix(std::move(value));
    return with_filters ? filters(std::move(value), false) : std::move(value);
  }

  NodePtr primary() {
    const Token& next = token();
    auto out = node(Kind::kConstant);
    if (next.kind == TokenKind::kName) {
      ++at_;
      const std::string& word = next.text;
      if (word == "true" || word == "True") out->constant = true;
      else if (word == "false" || word == "False") out->constant = false;
      else if (word == "none" || word == "None") out->constant = Value::None{};
      else {
        out->kind = Kind::kName;
        out->name = word;
      }
      return out;
    }
    if (next.kind == TokenKind::kString) {
      std::string text;
      while (token().kind == TokenKind::kString) text += tokens_[at_++].text;
      out->constant = std::move(text);
      return out;
    }
    if (next.kind == TokenKind::kInteger || next.kind == TokenKind::kFloat) {
      ++at_;
      const char* const begin = next.text.data();
      const char* const end = begin + next.text.size();
      int64_t whole = 0;
      double real = 0;
      if (next.kind == TokenKind::kInteger) {
        if (std::from_chars(begin, end, whole).ec != std::errc{}) refuse("a number beyond 2^63");
        out->constant = whole;
      } else {
        if (std::from_chars(begin, end, real).ec != std::errc{}) refuse("a number beyond what a float holds");
        out->constant = real;
      }
      return out;
    }
    if (skip("(")) {
      if (skip(")")) return node(Kind::kTuple);
      NodePtr inside = tuple(true);
      expect(")");
      return inside;
    }
    if (skip("[")) {
      auto list = node(Kind::kList);
      while (!skip("]")) {
        if (!list->children.empty()) {
          expect(",");
          if (skip("]")) break;
        }
        list->children.push_back(expression());
      }
      return list;
    }
    if (skip("{")) {
      auto dict = node(Kind::kDict);
      while (!skip("}")) {
        if (!dict->children.empty()) {
          expect(",");
          if (skip("}")) break;
        }
        dict->children.push_back(expression());
        expect(":");
        dict->children.push_back(expression());
      }
      return dict;
    }
    fail(message("got '{}' where a value must stand", next.text));
  }

  NodePtr postfix(NodePtr value) {
    Chain chain(*this);
    for (;;) {
      if (sees(".") || sees("[") || sees("(")) chain.grow();
      if (skip(".")) {
        if (token().kind == TokenKind::kInteger) {
          auto key = primary();
          value = node(Kind::kItem, std::move(value), std::move(key));
          continue;
        }
        auto out = node(Kind::kAttribute, std::move(value));
        out->name = name();
        value = std::move(out);
      } else if (skip("[")) {
        value = subscript(std::move(value));
      } else if (sees("(")) {
        auto out = node(Kind::kCall, std::move(value));
        arguments(*out);
        value = std::move(out);
      } else {
        return value;
      }
    }
  }

  NodePtr subscript(NodePtr value) {
    NodePtr from = sees(":") ? nullptr : expression();
    if (!skip(":")) {
      if (sees(",")) refuse("a tuple as a key");
      expect("]");
      return node(Kind::kItem, std::move(value), std::move(from));
    }
    NodePtr to = sees(":") || sees("]") ? nullptr : expression(), step;
    if (skip(":") && !sees("]")) step = expression();
    expect("]");
    return node(Kind::kSlice, std::move(value), std::move(from), std::move(to), std::move(step));
  }

  /// In parentheses. Children and keywords of the node.
  void arguments(Node& out) {
    expect("(");
    for (bool first = true; !skip(")"); first = false) {
      if (!first) {
        expect(",");
        if (skip(")")) return;
      }
      if (sees("*") || sees("**")) refuse("lists of arguments (*)");
      if (token().kind == TokenKind::kName && sees("=", 1)) {
        std::string key = name();
        ++at_;
        out.keywords.emplace_back(std::move(key), expression());
      } else {
        if (!out.keywords.empty()) fail("an argument without a name follows one with a name");
        out.children.push_back(expression());
      }
    }
  }

  /// Filters, tests and calls behind a value. @param inside  a filter block's first filter has no bar.
  NodePtr filters(NodePtr value, bool inside) {
    Chain chain(*this);
    for (;;) {
      if (sees("|") || sees("(") || sees_word("is")) chain.grow();
      if (inside || skip("|")) {
        auto out = node(Kind::kFilter, std::move(value));
        out->name = name();
        if (!has_filter(out->name)) refuse(message("the filter '{}'", out->name));
        if (sees("(")) arguments(*out);
        value = std::move(out);
        inside = false;
      } else if (value && skip_word("is")) {
        value = test(std::move(value));
      } else if (value && sees("(")) {
        auto out = node(Kind::kCall, std::move(value));
        arguments(*out);
        value = std::move(out);
      } else {
        return value;
      }
    }
  }

  NodePtr test(NodePtr value) {
    const bool negated = skip_word("not");
    auto out = node(Kind::kTest, std::move(value));
    out->name = name();
    if (!has_test(out->name)) refuse(message("the test '{}'", out->name));
    const TokenKind next = token().kind;
    const bool word = next == TokenKind::kName && !sees_word("else") && !sees_word("or") && !sees_word("and");
    if (sees("(")) {
      arguments(*out);
    } else if (word || next == TokenKind::kString || next == TokenKind::kInteger || next == TokenKind::kFloat || sees("[") ||
               sees("{")) {
      if (sees_word("is")) fail("tests cannot follow each other");
      out->children.push_back(postfix(primary()));
    }
    if (!negated) return out;
    return node(Kind::kNot, NodePtr(std::move(out)));
  }

  std::vector<Token> tokens_;
  const std::string& where_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace qlorapp::jinja
