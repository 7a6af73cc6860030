// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "core/check.hpp"
#include "expression_parser.hpp"
#include "syntax.hpp"

namespace qlorapp::jinja {
namespace {

/// Whether a statement of a loop's body looks at `loop`, which knows the items to come.
bool asks_for_loop(const Node& node) {
  const auto asks = [](const NodePtr& part) { return part && asks_for_loop(*part); };
  return (node.kind == Kind::kName && node.name == "loop") || std::any_of(node.children.begin(), node.children.end(), asks) ||
         std::any_of(node.body.begin(), node.body.end(), asks) || std::any_of(node.other.begin(), node.other.end(), asks) ||
         std::any_of(node.keywords.begin(), node.keywords.end(), [&](const auto& named) { return asks(named.second); });
}

class Parser : ExpressionParser {
 public:
  Parser(std::vector<Token> tokens, const std::string& where) : ExpressionParser(std::move(tokens), where) {}

  Body run() { return statements({}); }

 private:
  using Words = std::initializer_list<std::string_view>;

  /// Up to a tag that begins with one of the words, whose name is left to be read.
  Body statements(Words ends) {
    const Level level(*this);
    Body out;
    for (;;) {
      const Token& next = token();
      if (next.kind == TokenKind::kEnd) {
        if (ends.size() > 0) fail(message("'{}' is missing", *(ends.end() - 1)));
        return out;
      }
      ++at_;
      if (next.kind == TokenKind::kText) {
        auto text = node(Kind::kText);
        text->name = next.text;
        out.push_back(std::move(text));
      } else if (next.kind == TokenKind::kVariableBegin) {
        out.push_back(node(Kind::kOutput, tuple(true)));
        if (token().kind != TokenKind::kVariableEnd) fail(message("expected the end of the tag before '{}'", token().text));
        ++at_;
      } else {
        if (std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return sees_word(end); })) return out;
        out.push_back(statement());
      }
    }
  }

  /// The body of a statement whose tag ends here, through the tag that ends it.
  Body body(std::string_view end) {
    end_block();
    // A loop is not left from what is written into a text.
    const int loops = end == "endfor" || end == "endif" || end == "endwith" ? loops_ : std::exchange(loops_, 0);
    Body out = statements({end});
    loops_ = loops;
    expect_word(end);
    if (end == "endmacro" || end == "endcall") {
      if (token().kind == TokenKind::kName) ++at_;
    }
    end_block();
    return out;
  }

  NodePtr statement() {
    const std::string word = name();
    if (word == "if") return if_statement();
    if (word == "for") return for_statement();
    if (word == "set") return set_statement();
    if (word == "macro") {
      auto out = node(Kind::kMacro);
      out->name = name();
      parameters(*out);
      out->body = body("endmacro");
      return out;
    }
    if (word == "call") {
      auto out = node(Kind::kCallBlock);
      Body defaults;
      if (sees("(")) {
        parameters(*out);
        defaults = std::move(out->children);
        out->children.clear();
      }
      out->children.push_back(expression());
      if (out->children[0]->kind != Kind::kCall) fail("'call' needs a call");
      for (NodePtr& value : defaults) out->children.push_back(std::move(value));
      out->body = body("endcall");
      return out;
    }
    if (word == "filter") {
      auto out = node(Kind::kFilterBlock, filters(nullptr, true));
      out->body = body("endfilter");
      return out;
    }
    if (word == "with") {
      auto out = node(Kind::kWith);
      while (token().kind != TokenKind::kBlockEnd) {
        if (!out->children.empty()) expect(",");
        out->children.push_back(target(false));
        expect("=");
        out->children.push_back(expression());
      }
      out->body = body("endwith");
      return out;
    }
    if (word == "generation") {
      auto out = node(Kind::kGeneration);
      out->body = body("endgeneration");
      return out;
    }
    if (word == "break" || word == "continue") {
      if (loops_ == 0) fail(message("'{}' stands in no loop", word));
      auto out = node(word == "break" ? Kind::kBreak : Kind::kContinue);
      end_block();
      return out;
    }
    constexpr std::array<std::string_view, 7> kOthers{"include", "import", "from", "extends", "block", "autoescape", "trans"};
    if (std::find(kOthers.begin(), kOthers.end(), word) != kOthers.end()) refuse(message("{{% {} %}}", word));
    fail(message("got the unknown tag '{}'", word));
  }

  NodePtr if_statement() {
    auto out = node(Kind::kIf, tuple(false));
    end_block();
    out->body = statements({"elif", "else", "endif"});
    if (skip_word("elif")) {
      const Level level(*this);
      out->other.push_back(if_statement());
    } else if (skip_word("else")) {
      out->other = body("endif");
    } else {
      expect_word("endif");
      end_block();
    }
    return out;
  }

  NodePtr for_statement() {
    auto out = node(Kind::kFor, target(false));
    expect_word("in");
    out->children.push_back(tuple(false));
    out->children.push_back(skip_word("if") ? expression() : nullptr);
    if (sees_word("recursive")) refuse("recursive loops");
    end_block();
    ++loops_;
    out->body = statements({"else", "endfor"});
    --loops_;
    out->name =
        std::any_of(out->body.begin(), out->body.end(), [](const NodePtr& part) { return asks_for_loop(*part); }) ? "" : "lazy";
    if (skip_word("else")) {
      out->other = body("endfor");
    } else {
      expect_word("endfor");
      end_block();
    }
    return out;
  }

  NodePtr set_statement() {
    NodePtr into = target(true);
    if (skip("=")) {
      auto out = node(Kind::kSet, std::move(into), tuple(true));
      end_block();
      return out;
    }
    auto out = node(Kind::kSetBlock, std::move(into), sees("|") ? filters(nullptr, false) : nullptr);
    out->body = body("endset");
    return out;
  }

  /// Names of parameters in parentheses, and the defaults of the last ones.
  void parameters(Node& out) {
    expect("(");
    while (!skip(")")) {
      if (!out.names.empty()) expect(",");
      if (skip(")")) break;
      out.names.push_back(name());
      if (skip("=")) out.children.push_back(expression());
      else if (!out.children.empty()) fail("a parameter without a default follows one with a default");
    }
  }

  /// What a value is bound to: a name, names, or an attribute of a namespace.
  NodePtr target(bool spaces) {
    const Level level(*this);
    NodePtr first = one_target(spaces);
    if (!sees(",")) return first;
    auto out = node(Kind::kTuple, std::move(first));
    while (skip(",")) {
      if (sees_word("in")) break;
      out->children.push_back(one_target(spaces));
    }
    return out;
  }

  NodePtr one_target(bool spaces) {
    if (skip("(")) {
      NodePtr inside = target(spaces);
      expect(")");
      return inside;
    }
    auto out = node(Kind::kName);
    out->name = name();
    if (!spaces || !skip(".")) return out;
    auto attribute = node(Kind::kAttribute, NodePtr(std::move(out)));
    attribute->name = name();
    return attribute;
  }

  int loops_ = 0;
};

}  // namespace

Body parse(std::string_view source, const std::string& where) { return Parser(tokens_of(source, where), where).run(); }

}  // namespace qlorapp::jinja
