// SPDX-License-Identifier: Apache-2.0
/// Jinja's source as a tree, by the rules of Jinja 3 with trim_blocks and lstrip_blocks, as transformers sets them. Torch-free.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "value.hpp"

namespace qlorapp::jinja {

/// A statement or an expression. What `children`, `name` and `body` hold stands behind each kind.
enum class Kind {
  // Expressions
  kConstant,   // constant
  kName,       // name
  kList,       // children: items
  kTuple,      // children: items
  kDict,       // children: key, value, key, value …
  kAttribute,  // children: object. name
  kItem,       // children: object, key
  kSlice,      // children: object, from, to, step; null where absent
  kCall,       // children: callee, arguments. keywords
  kFilter,     // children: value, arguments; value is null in a {% filter %} or {% set %} block. name, keywords
  kTest,       // children: value, arguments. name, keywords
  kNot,
  kNegative,
  kPositive,  // children: value
  kAnd,
  kOr,
  kChoice,   // children: left, right; kChoice: condition, value, other (may be null)
  kCompare,  // children: values. names: the operator before each but the first
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kJoin,  // children: left, right
  // Statements
  kText,         // name
  kOutput,       // children: values
  kIf,           // children: condition, null for the last. body, other: the branches behind it
  kFor,          // children: target, items, filter or null. body, other; name is "lazy" if the body does not ask for `loop`
  kSet,          // children: target, value
  kSetBlock,     // children: target, filter or null. body
  kMacro,        // name, names: parameters, children: defaults of the last ones. body
  kCallBlock,    // children: the call, defaults; names: parameters of caller. body
  kFilterBlock,  // children: the filter. body
  kWith,         // children: target, value, target, value …. body
  kGeneration,   // body
  kBreak,
  kContinue,
};

struct Node;
using NodePtr = std::unique_ptr<const Node>;
using Body = std::vector<NodePtr>;

struct Node {
  Kind kind;
  int line = 0;
  std::string name = {};
  Value constant = {};
  std::vector<NodePtr> children = {};
  std::vector<std::string> names = {};
  std::vector<std::pair<std::string, NodePtr>> keywords = {};
  Body body = {}, other = {};
};

/// @throws FormatError "[where] …" with the line for malformed source, and for what is Jinja but not computed here.
[[nodiscard]] Body parse(std::string_view source, const std::string& where);

/// Whether a filter or a test of this name exists (builtins.cpp).
[[nodiscard]] bool has_filter(std::string_view name);
[[nodiscard]] bool has_test(std::string_view name);

// --- what parser.cpp has of lexer.cpp

enum class TokenKind {
  kText,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kBlockBegin,
  kBlockEnd,
  kVariableBegin,
  kVariableEnd,
  kEnd
};
struct Token {
  TokenKind kind;
  std::string text;  ///< A string's value.
  int line;
};
[[nodiscard]] std::vector<Token> tokens_of(std::string_view source, const std::string& where);

}  // namespace qlorapp::jinja
