// SPDX-License-Identifier: Apache-2.0
/// Normalizer, pre-tokenizer and decoder of a tokenizer.json as checked descriptions. Torch-free.
///
/// Components not listed here are refused by name, never approximated.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "normalizer.hpp"
#include "pretokenize.hpp"
#include "token_decoder.hpp"

namespace qlorapp {

enum class PrependScheme { kNever, kFirst, kAlways };

/// The step of Metaspace and ByteLevel(add_prefix_space=true) before text is cut: each space becomes `marker`, and
/// one is put in front where the stretch does not start with it.
struct SpaceMarker {
  std::string marker;
  PrependScheme prepend = PrependScheme::kAlways;  ///< kFirst: only for the stretch at the start of the text.
};

struct PreTokenizer {
  bool byte_level = false;  ///< Pieces are spelled in GPT-2's alphabet.
  std::optional<SpaceMarker> marker;
  std::vector<SplitStep> splits;  ///< Applied one behind the other, after the marker.
};

struct DecoderDescription {
  std::vector<DecodeStep> steps;
  bool byte_level = false;  ///< kByteLevel alone.
};

/// The questions that every reader of a component asks; knows the file's name for messages.
class ComponentReader {
 public:
  using json = nlohmann::json;
  explicit ComponentReader(const std::string& where) : where_(where) {}

  [[nodiscard]] std::vector<TextStep> normalizer(const json& component) const;
  [[nodiscard]] PreTokenizer pre_tokenizer(const json& component) const;
  [[nodiscard]] DecoderDescription decoder(const json& component) const;

  /// For what every reader refuses. @throws FormatError "[file] rule. Ways out."
  void require(bool condition, const std::string& rule) const;
  /// For what this library does not know. @throws UnsupportedError with the same text.
  void support(bool condition, const std::string& rule) const;
  void known_keys(const json& object, std::string_view name, std::initializer_list<std::string_view> known) const;
  [[nodiscard]] bool flag(const json& object, const char* key, bool fallback) const;
  /// @returns object[key], or null where there is none.
  [[nodiscard]] static const json& at(const json& object, const char* key);
  /// @returns "null", the type, or words for a component without one.
  [[nodiscard]] static std::string type_of(const json& component);

 private:
  void add_normalizer(const json& component, std::vector<TextStep>& out) const;
  void add_pre_tokenizer(const json& component, PreTokenizer& out) const;
  void add_byte_level(const json& component, PreTokenizer& out) const;
  void add_metaspace(const json& component, PreTokenizer& out) const;
  void add_split(const json& component, PreTokenizer& out) const;
  void add_split_on_regex(const json& regex, const json& behavior, bool invert, PreTokenizer& out) const;
  void add_decoder(const json& component, std::vector<DecodeStep>& out) const;
  /// @returns object[key], a string of at most kLongestText bytes.
  [[nodiscard]] std::string text(const json& object, const char* key, std::string_view name, bool may_be_empty) const;
  /// @returns object[key], one code point as UTF-8.
  [[nodiscard]] std::string character(const json& object, const char* key, std::string_view name) const;
  [[nodiscard]] std::size_t count(const json& object, const char* key, std::string_view name) const;
  [[nodiscard]] PrependScheme prepend_scheme(const json& metaspace) const;
  /// @returns the String of a pattern; a Regex is refused.
  [[nodiscard]] std::string literal(const json& component, std::string_view name) const;
  [[nodiscard]] const json& parts(const json& sequence, const char* key, std::string_view name) const;

  const std::string& where_;
};

}  // namespace qlorapp
