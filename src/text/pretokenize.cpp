// SPDX-License-Identifier: Apache-2.0
#include "pretokenize.hpp"

#include <algorithm>

namespace qlorapp {
namespace {

using unicode::CodePoint;
using unicode::kLetter;
using unicode::kNumber;
using unicode::kNumeric;
using unicode::kSpace;

/// A position in a piece, with the questions that the patterns ask.
class Scanner {
 public:
  Scanner(const std::vector<CodePoint>& text, Piece range) : text_(text), range_(range) {}

  [[nodiscard]] bool inside(std::size_t i) const { return i < range_.end; }
  [[nodiscard]] uint32_t at(std::size_t i) const { return inside(i) ? text_[i].value : 0xFFFFFFFFu; }
  [[nodiscard]] bool is(std::size_t i, uint8_t classes) const { return inside(i) && (text_[i].classes & classes) != 0; }
  [[nodiscard]] bool is_other(std::size_t i) const { return inside(i) && (text_[i].classes & (kLetter | kNumber | kSpace)) == 0; }
  [[nodiscard]] bool is_newline(std::size_t i) const { return at(i) == '\r' || at(i) == '\n'; }

  [[nodiscard]] std::size_t skip(std::size_t i, uint8_t classes) const {
    while (is(i, classes)) ++i;
    return i;
  }
  [[nodiscard]] std::size_t skip_other(std::size_t i) const {
    while (is_other(i)) ++i;
    return i;
  }
  [[nodiscard]] std::size_t skip_newlines(std::size_t i) const {
    while (is_newline(i)) ++i;
    return i;
  }

  /// 's 't 're 've 'm 'll 'd. In any case, ſ (U+017F) is an s: case folding says so.
  [[nodiscard]] std::size_t contraction(std::size_t i, bool any_case) const {
    if (at(i) != '\'') return i;
    const uint32_t first = folded(i + 1, any_case), second = folded(i + 2, any_case);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return i + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l')) return i + 3;
    return i;
  }

  /// \s+(?!\S)|\s+ at a white space: the whole run at the end of the text or when it is one long, else all but its last.
  [[nodiscard]] std::size_t white_space(std::size_t i) const {
    const std::size_t run = skip(i, kSpace);
    return run == range_.end || run == i + 1 ? run : run - 1;
  }

 private:
  [[nodiscard]] uint32_t folded(std::size_t i, bool any_case) const {
    const uint32_t c = at(i);
    if (!any_case) return c;
    if (c >= 'A' && c <= 'Z') return c + ('a' - 'A');
    return c == 0x017F ? 's' : c;
  }

  const std::vector<CodePoint>& text_;
  Piece range_;
};

/// Each function returns the end of the piece that starts at i < end; alternatives in the order of the pattern.
std::size_t next_llama3(const Scanner& s, std::size_t i, std::size_t digits) {
  if (const std::size_t end = s.contraction(i, true); end != i) return end;
  // [^\r\n\p{L}\p{N}]?\p{L}+
  if (s.is(i, kLetter)) return s.skip(i, kLetter);
  if (!s.is_newline(i) && !s.is(i, kNumber) && s.is(i + 1, kLetter)) return s.skip(i + 1, kLetter);
  // \p{N}{1,digits}
  if (s.is(i, kNumber)) {
    std::size_t end = i;
    while (end - i < digits && s.is(end, kNumber)) ++end;
    return end;
  }
  // ' ?[^\s\p{L}\p{N}]+[\r\n]*'
  const std::size_t other = s.at(i) == ' ' ? i + 1 : i;
  if (s.is_other(other)) return s.skip_newlines(s.skip_other(other));
  // \s*[\r\n]+ : up to the last line end of the run of white space
  const std::size_t run = s.skip(i, kSpace);
  for (std::size_t end = run; end > i; --end) {
    if (s.is_newline(end - 1)) return end;
  }
  return s.white_space(i);
}

std::size_t next_gpt2(const Scanner& s, std::size_t i) {
  if (const std::size_t end = s.contraction(i, false); end != i) return end;
  const std::size_t start = s.at(i) == ' ' ? i + 1 : i;  // ' ?'
  if (s.is(start, kLetter)) return s.skip(start, kLetter);
  if (s.is(start, kNumber)) return s.skip(start, kNumber);
  if (s.is_other(start)) return s.skip_other(start);
  return s.white_space(i);
}

std::size_t next_digits(const Scanner& s, std::size_t i, bool individual) {
  if (s.is(i, kNumeric)) return individual ? i + 1 : s.skip(i, kNumeric);
  while (s.inside(i) && !s.is(i, kNumeric)) ++i;
  return i;
}

std::size_t next_delimited(const Scanner& s, std::size_t i, const SplitStep& step) {
  const auto is_delimiter = [&](std::size_t at) { return s.inside(at) && s.at(at) == step.delimiter; };
  if (step.split == Split::kAroundDelimiter && is_delimiter(i)) return i + 1;
  std::size_t end = step.split == Split::kBeforeDelimiter ? i + 1 : i;
  while (step.split == Split::kBeforeRuns && is_delimiter(end)) ++end;
  while (s.inside(end) && !is_delimiter(end)) ++end;
  return step.split == Split::kAfterDelimiter && s.inside(end) ? end + 1 : end;
}

std::size_t next_piece(const SplitStep& step, const Scanner& s, std::size_t i) {
  switch (step.split) {
    case Split::kLlama3:
      return next_llama3(s, i, 3);
    case Split::kQwen2:
      return next_llama3(s, i, 1);
    case Split::kGpt2:
      return next_gpt2(s, i);
    case Split::kIndividualDigits:
      return next_digits(s, i, true);
    case Split::kContiguousDigits:
      return next_digits(s, i, false);
    case Split::kBeforeDelimiter:
    case Split::kAfterDelimiter:
    case Split::kAroundDelimiter:
    case Split::kBeforeRuns:
      return next_delimited(s, i, step);
    case Split::kPattern:
    case Split::kMatches:
      break;
  }
  return i + 1;
}

}  // namespace

std::string_view pattern_of(Split split) {
  switch (split) {
    case Split::kLlama3:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    case Split::kQwen2:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    case Split::kGpt2:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    default:
      return {};
  }
}

void split_pieces(const SplitStep& step, const std::vector<unicode::CodePoint>& text, Piece range, std::vector<Piece>& out) {
  if (step.pattern) return step.pattern->split(text, range, step.split == Split::kPattern, out);
  const Scanner scanner(text, range);
  for (std::size_t i = range.begin; i < range.end;) {
    const std::size_t end = next_piece(step, scanner, i);
    out.push_back({i, end});
    i = end;
  }
}

namespace {

bool is_pattern(const SplitStep& step) { return !pattern_of(step.split).empty(); }

constexpr std::size_t kAhead = 4;  // a pattern looks fewer characters ahead, but for runs of white space

/// Behind the last character of the window that is no white space. The pieces of a run that reaches the end may change.
std::size_t end_of_words(const std::vector<CodePoint>& text) {
  std::size_t end = text.size();
  while (end > 0 && (text[end - 1].classes & kSpace) != 0) --end;
  return end;
}

/// The pieces of a pattern that nothing behind the window can change. A match begins where the one before ended, so another window may begin
/// behind them.
void settled_pieces(const SplitStep& step, const std::vector<CodePoint>& text, std::vector<Piece>& out) {
  const std::size_t words = end_of_words(text);
  const Scanner scanner(text, {0, text.size()});
  out.clear();
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t end = next_piece(step, scanner, i);
    if (end + kAhead > text.size() || end >= words) break;
    out.push_back({i, end});
    i = end;
  }
}

/// The last place where a letter ends: each pattern cuts there, also in the pieces of other splits.
std::size_t last_end_of_letters(const std::vector<CodePoint>& text) {
  for (std::size_t i = std::min(end_of_words(text), text.size() - std::min(text.size(), kAhead)); i-- > 1;) {
    if ((text[i - 1].classes & kLetter) != 0 && (text[i].classes & kLetter) == 0) return i;
  }
  return 0;
}

/// The last place where a word of ASCII letters ends before a space or line feed, if all steps together always cut there and none looks
/// across it.
std::size_t last_end_of_word(const std::vector<SplitStep>& steps, const std::vector<CodePoint>& text) {
  const auto respects = [](const SplitStep& step) { return !step.pattern || step.pattern->respects_word_ends(); };
  const auto cuts = [](const SplitStep& step) { return is_pattern(step) || (step.pattern && step.pattern->cuts_word_ends()); };
  if (!std::all_of(steps.begin(), steps.end(), respects) || !std::any_of(steps.begin(), steps.end(), cuts)) return 0;
  for (std::size_t i = text.size(); i-- > 1;) {
    const uint32_t before = text[i - 1].value | 0x20u;
    if (before >= 'a' && before <= 'z' && (text[i].value == ' ' || text[i].value == '\n')) return i;
  }
  return 0;
}

/// Splits the pieces by the steps from `first` on, which look at the piece alone.
void split_further(const std::vector<SplitStep>& steps, std::size_t first, const std::vector<CodePoint>& text,
                   std::vector<Piece>& pieces) {
  std::vector<Piece> finer;
  for (std::size_t k = first; k < steps.size(); ++k) {
    finer.clear();
    for (const Piece piece : pieces) split_pieces(steps[k], text, piece, finer);
    pieces.swap(finer);
  }
}

}  // namespace

std::size_t split_window(const std::vector<SplitStep>& steps, const std::vector<CodePoint>& text, bool is_end,
                         std::vector<Piece>& out) {
  if (!is_end && std::any_of(steps.begin(), steps.end(), [](const SplitStep& step) { return step.pattern != nullptr; })) {
    const std::size_t end = last_end_of_word(steps, text);
    out.assign(end == 0 ? 0 : 1, {0, end});
    split_further(steps, 0, text, out);
    return end;
  }
  const bool has_pattern = std::any_of(steps.begin(), steps.end(), is_pattern);
  if (!is_end && has_pattern && is_pattern(steps[0])) {
    settled_pieces(steps[0], text, out);
    const std::size_t end = out.empty() ? 0 : out.back().end;
    split_further(steps, 1, text, out);
    return end;
  }
  const std::size_t end = is_end || !has_pattern ? text.size() : last_end_of_letters(text);
  out.assign(end == 0 ? 0 : 1, {0, end});
  split_further(steps, 0, text, out);
  if (is_end || has_pattern) return end;
  const std::size_t last = out.back().begin;  // the last piece may go on
  out.pop_back();
  return last;
}

}  // namespace qlorapp
