// SPDX-License-Identifier: Apache-2.0
// Reads the expression of a SplitPattern.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "split_pattern.hpp"

namespace qlorapp {
namespace {

constexpr std::size_t kLongestExpression = 4096;
constexpr std::size_t kMostNodes = 512;
constexpr int kDeepest = 8;
constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

/// Leaves the reader; its text is the reason.
struct Unknown {
  std::string why;
};

[[noreturn]] void refuse(std::string why) { throw Unknown{std::move(why)}; }

uint32_t categories_named(std::string_view name) {
  uint32_t mask = 0;
  for (std::size_t i = 0; i < unicode::kCategories.size(); ++i) {
    const std::string_view category = unicode::kCategories[i];
    if (name.size() <= 2 && category.starts_with(name)) mask |= uint32_t{1} << i;
  }
  if (name.empty() || mask == 0) refuse(message("\\p{{{}}} is not supported", name));
  return mask;
}

constexpr uint32_t kEveryCategory = (uint32_t{1} << unicode::kCategories.size()) - 1;

}  // namespace

class SplitPatternReader {
 public:
  explicit SplitPatternReader(std::string_view expression) : text_(unicode::decode(expression)) {}

  std::shared_ptr<const SplitPattern> read() {
    const int match = add({});
    out_->start_ = group(match, 0, false);
    if (at_ != text_.size()) refuse("a ')' closes no group");
    if (may_be_empty(out_->start_)) refuse("a pattern must not match an empty text");
    out_->look_at_words();
    return out_;
  }

 private:
  using Node = SplitPattern::Node;

  [[nodiscard]] uint32_t peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead].value : 0xFFFFFFFFu;
  }
  [[nodiscard]] bool is(std::string_view next) const {
    for (std::size_t i = 0; i < next.size(); ++i) {
      if (peek(i) != static_cast<uint8_t>(next[i])) return false;
    }
    return true;
  }
  bool take(std::string_view next) {
    if (!is(next)) return false;
    at_ += next.size();
    return true;
  }

  int add(Node node) {
    if (out_->nodes_.size() >= kMostNodes) refuse("it is too long");
    out_->nodes_.push_back(std::move(node));
    return static_cast<int>(out_->nodes_.size()) - 1;
  }

  int add_set(CharacterSet set) {
    set.finish();
    out_->sets_.push_back(std::move(set));
    return static_cast<int>(out_->sets_.size()) - 1;
  }

  /// Alternatives up to the end or a ')'. @returns the node to begin with; each goes on with `next`.
  int group(int next, int depth, bool any_case) {
    if (depth > kDeepest) refuse("groups are nested too deeply");
    std::vector<int> alternatives{sequence(next, depth, any_case)};
    while (take("|")) alternatives.push_back(sequence(next, depth, any_case));
    if (alternatives.size() == 1) return alternatives[0];
    return add({.kind = Node::Kind::kAlternatives, .alternatives = std::move(alternatives)});
  }

  /// One part of a sequence. The node that follows is known only once the sequence has been read, from the right to the left.
  struct Part {
    Node node;
    std::size_t begin = 0, end = 0;  ///< Of a group: its text.
    bool is_group = false, any_case = false, optional = false;
  };

  int sequence(int next, int depth, bool any_case) {
    std::vector<Part> parts;
    uint32_t before = 0;  // the character in front, in (?i:…)
    while (at_ < text_.size() && peek() != '|' && peek() != ')') {
      const uint32_t now = any_case ? peek() : 0;
      if (now != 0 && (peek() == '(' || peek() == '\\')) refuse("(?i:…) may hold only contractions");
      if (before == 's' && (now == 's' || now == 't')) refuse("(?i:…) may hold only contractions");
      before = now;
      parts.push_back(part(depth, any_case));
    }
    const std::size_t resume = at_;
    for (auto p = parts.rbegin(); p != parts.rend(); ++p) next = placed(*p, next, depth);
    at_ = resume;
    return next;
  }

  int placed(const Part& part, int next, int depth) {
    Node node = part.node;
    if (!part.is_group) {
      node.next = next;
      return add(std::move(node));
    }
    at_ = part.begin;
    if (node.kind == Node::Kind::kAhead || node.kind == Node::Kind::kNotAhead) {
      const int match = add({});
      node.alternatives = {group(match, depth + 1, part.any_case)};
      node.next = next;
      return add(std::move(node));
    }
    const int inside = group(next, depth + 1, part.any_case);
    return part.optional ? add({.kind = Node::Kind::kAlternatives, .alternatives = {inside, next}}) : inside;
  }

  Part part(int depth, bool any_case) {
    Part out;
    if (take("$")) {
      out.node.kind = Node::Kind::kLineEnd;
      return out;
    }
    if (is("(")) return parenthesis(depth, any_case);
    out.node.kind = Node::Kind::kSet;
    out.node.set = add_set(is("[") ? bracket(any_case) : single(any_case));
    quantify(out.node);
    return out;
  }

  Part parenthesis(int depth, bool any_case) {
    Part out;
    out.is_group = true;
    out.any_case = any_case;
    if (take("(?!")) out.node.kind = Node::Kind::kNotAhead;
    else if (take("(?=")) out.node.kind = Node::Kind::kAhead;
    else if (take("(?i:")) out.any_case = true;
    else if (!take("(?:") && (!take("(") || is("?"))) refuse("a group of this kind is not supported");
    out.begin = at_;
    // Read once to find the end; the nodes of this reading are unreachable.
    const int nowhere = add({});
    (void)group(nowhere, depth + 1, out.any_case);
    if (!take(")")) refuse("a group does not end");
    Node repeated;
    quantify(repeated);
    if (repeated.most > 1 || repeated.possessive || (repeated.least == 0 && out.node.kind != Node::Kind::kMatch))
      refuse("a group must not be repeated");
    out.optional = repeated.least == 0;
    return out;
  }

  void quantify(Node& node) {
    if (take("?")) {
      node.least = 0;
    } else if (take("*")) {
      node.least = 0;
      node.most = kUnlimited;
    } else if (take("+")) {
      node.most = kUnlimited;
    } else if (is("{")) {
      counts(node);
      if (is("+") || is("?") || is("*") || is("{")) refuse("a quantifier behind another is not supported");
      return;
    } else {
      return;
    }
    node.possessive = take("+");
    if (is("?") || is("*") || is("+") || is("{")) refuse("a quantifier behind another is not supported");
  }

  void counts(Node& node) {
    take("{");
    const auto number = [&] {
      std::size_t value = 0;
      if (peek() < '0' || peek() > '9') refuse("a quantifier must be {m}, {m,} or {m,n}");
      for (; peek() >= '0' && peek() <= '9' && value < 1000; ++at_) value = value * 10 + (peek() - '0');
      return value;
    };
    node.least = node.most = number();
    if (take(",")) node.most = is("}") ? kUnlimited : number();
    if (!take("}") || node.most < node.least || node.most == 0) refuse("a quantifier must be {m}, {m,} or {m,n}");
  }

  /// A character with its other case. Only those of English contractions: nothing else is published, and folding has long rules.
  static void add_character(CharacterSet& set, uint32_t c, bool any_case) {
    set.add(c, c);
    if (!any_case || c == '\'') return;
    if (std::string_view("sdmtlver").find(static_cast<char>(c)) == std::string_view::npos || c > 'z')
      refuse("(?i:…) may hold only contractions");
    set.add(c - ('a' - 'A'), c - ('a' - 'A'));
    if (c == 's') set.add(0x17F, 0x17F);
  }

  CharacterSet single(bool any_case) {
    CharacterSet out;
    const uint32_t c = peek();
    if (c == '\\') {
      if (const auto escaped = escape(out)) out.add(*escaped, *escaped);
      return out;
    }
    ++at_;
    if (c == '.') {
      out.add('\n', '\n');
      out.negate();
      return out;
    }
    if (c == '^' || c == '{' || c == '}' || c == ']' || c == '?' || c == '*' || c == '+')
      refuse(message("'{}' is not supported here", static_cast<char>(c)));
    add_character(out, c, any_case);
    return out;
  }

  /// Reads an escape sequence from its backslash on. @returns its character, or nullopt if it is a class, which is added to `set`.
  std::optional<uint32_t> escape(CharacterSet& set) {
    ++at_;
    const uint32_t c = peek();
    if (at_ == text_.size()) refuse("it ends in a backslash");
    ++at_;
    switch (c) {
      case 'r':
        return '\r';
      case 'n':
        return '\n';
      case 't':
        return '\t';
      case 's':
      case 'S':
        set.add_white_space(c == 'S');
        return std::nullopt;
      case 'd':
      case 'D':
        set.add_categories(c == 'd' ? categories_named("Nd") : kEveryCategory & ~categories_named("Nd"));
        return std::nullopt;
      case 'p':
      case 'P': {
        if (!take("{")) refuse("\\p must have the form \\p{L}");
        std::string name;
        for (; at_ < text_.size() && peek() != '}' && name.size() < 32; ++at_) unicode::append_utf8(name, peek());
        if (!take("}")) refuse("\\p must have the form \\p{L}");
        const uint32_t mask = categories_named(name);
        set.add_categories(c == 'p' ? mask : kEveryCategory & ~mask);
        return std::nullopt;
      }
      default:
        if (c >= 0x80 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'))
          refuse(message("\\{} is not supported", c < 0x80 ? std::string(1, static_cast<char>(c)) : "…"));
        return c;
    }
  }

  CharacterSet bracket(bool any_case) {
    CharacterSet out;
    take("[");
    const bool negated = take("^");
    if (is("]")) refuse("an empty class is not supported");
    while (!is("]")) {
      if (at_ >= text_.size()) refuse("a class does not end");
      if (is("[") || is("&&")) refuse("a class inside another is not supported");
      const auto first = member(out);
      if (!first) continue;
      if (!is("-") || peek(1) == ']') {
        add_character(out, *first, any_case);
        continue;
      }
      take("-");
      const auto last = member(out);
      if (!last || *last < *first || any_case) refuse("a range must have two characters in order");
      out.add(*first, *last);
    }
    take("]");
    if (negated) out.negate();
    return out;
  }

  std::optional<uint32_t> member(CharacterSet& set) {
    if (is("\\")) return escape(set);
    if (at_ >= text_.size()) refuse("a class does not end");
    return text_[at_++].value;
  }

  [[nodiscard]] bool may_be_empty(int start) const {
    std::vector<bool> seen(out_->nodes_.size(), false);
    std::vector<int> open{start};
    while (!open.empty()) {
      const auto at = static_cast<std::size_t>(open.back());
      open.pop_back();
      if (seen[at]) continue;
      seen[at] = true;
      const Node& n = out_->nodes_[at];
      if (n.kind == Node::Kind::kMatch) return true;
      if (n.kind == Node::Kind::kAlternatives) open.insert(open.end(), n.alternatives.begin(), n.alternatives.end());
      else if (n.kind != Node::Kind::kSet || n.least == 0) open.push_back(n.next);
    }
    return false;
  }

  std::vector<unicode::CodePoint> text_;
  std::size_t at_ = 0;
  std::shared_ptr<SplitPattern> out_ = std::make_shared<SplitPattern>();
};

std::shared_ptr<const SplitPattern> SplitPattern::parse(std::string_view expression, std::string& why) {
  if (expression.size() > kLongestExpression) {
    why = message("it must have at most {} bytes", kLongestExpression);
    return nullptr;
  }
  try {
    return SplitPatternReader(expression).read();
  } catch (const Unknown& unknown) {
    why = unknown.why;
    return nullptr;
  }
}

}  // namespace qlorapp
