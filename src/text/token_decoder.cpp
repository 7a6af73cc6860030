// SPDX-License-Identifier: Apache-2.0
#include "token_decoder.hpp"

#include <iterator>
#include <string_view>

#include "byte_pair.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

using Pieces = std::vector<std::string>;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

void replace_in(std::string& text, std::string_view pattern, std::string_view content) {
  std::string out;
  std::size_t done = 0;
  for (std::size_t found = text.find(pattern); found != std::string::npos; found = text.find(pattern, done)) {
    out.append(text, done, found - done).append(content);
    done = found + pattern.size();
  }
  if (done == 0) return;
  text = out.append(text, done);
}

void strip_in(std::string& text, const DecodeStep& step) {
  std::string_view rest = text;
  for (std::size_t i = 0; i < step.start && rest.starts_with(step.pattern); ++i) rest.remove_prefix(step.pattern.size());
  for (std::size_t i = 0; i < step.stop && rest.ends_with(step.pattern); ++i) rest.remove_suffix(step.pattern.size());
  text = std::string(rest);
}

Pieces bytes_to_text(Pieces tokens) {
  Pieces out;
  std::string run;
  const auto end_run = [&] {
    if (run.empty()) return;
    if (unicode::first_invalid_utf8(run) == std::string_view::npos) {
      out.push_back(run);
    } else {
      for (std::size_t i = 0; i < run.size(); ++i) out.emplace_back("\xEF\xBF\xBD");
    }
    run.clear();
  };
  for (std::string& token : tokens) {
    if (const int byte = TokenDecoder::byte_of(token); byte >= 0) {
      run += static_cast<char>(static_cast<uint8_t>(byte));
      continue;
    }
    end_run();
    out.push_back(std::move(token));
  }
  end_run();
  return out;
}

std::string joined_pieces(const Pieces& tokens) {
  std::string out;
  for (const std::string& token : tokens) out += token;
  return out;
}

std::string text_of_alphabet(const Pieces& tokens) {
  std::string bytes, spelled, out;
  for (const std::string& token : tokens) bytes += bytes_of_token(token, spelled) ? spelled : token;
  unicode::append_lossy(out, bytes);
  return out;
}

Pieces apply(const DecodeStep& step, Pieces tokens) {
  switch (step.kind) {
    case DecodeStep::Kind::kByteLevel:
      return {text_of_alphabet(tokens)};
    case DecodeStep::Kind::kMetaspace:
      for (std::size_t i = 0; i < tokens.size(); ++i) replace_in(tokens[i], step.pattern, i == 0 && step.start != 0 ? "" : " ");
      return tokens;
    case DecodeStep::Kind::kReplace:
      for (std::string& token : tokens) replace_in(token, step.pattern, step.content);
      return tokens;
    case DecodeStep::Kind::kByteFallback:
      return bytes_to_text(std::move(tokens));
    case DecodeStep::Kind::kFuse:
      return {joined_pieces(tokens)};
    case DecodeStep::Kind::kStrip:
      for (std::string& token : tokens) strip_in(token, step);
      return tokens;
  }
  return tokens;
}

}  // namespace

int TokenDecoder::byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = token[3] == '+' ? 0 : hex_digit(token[3]);  // Rust's from_str_radix accepts a sign
  const int low = hex_digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

std::string TokenDecoder::token_of(uint8_t byte) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  return {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
}

std::string TokenDecoder::decode(std::vector<std::string> tokens) const {
  for (const DecodeStep& step : steps_) tokens = apply(step, std::move(tokens));
  return joined_pieces(tokens);
}

}  // namespace qlorapp
