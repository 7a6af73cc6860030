// SPDX-License-Identifier: Apache-2.0
#include "component_reader.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "json_reading.hpp"
#include "unicode.hpp"
#include "unsupported.hpp"

namespace qlorapp {
namespace {

using nlohmann::json;

constexpr std::size_t kLongestPattern = 64;  // of a pattern and of what replaces it
constexpr std::size_t kMostSteps = 32;
constexpr std::string_view kAdvice =
    "Give rows of input_ids, tokenized in Python, or use the wheel's qlorapp command with transformers installed.";
constexpr std::string_view kCopyAgain = "Copy tokenizer.json from the model again, or give rows of input_ids, tokenized in Python.";

}  // namespace

void ComponentReader::require(bool condition, const std::string& rule) const {
  QLORAPP_CHECK_FORMAT(condition, "[{}] {}. {}", where_, rule, kCopyAgain);
}

void ComponentReader::support(bool condition, const std::string& rule) const {
  if (!condition) throw UnsupportedError(message("[{}] {}. {}", where_, rule, kAdvice));
}

const json& ComponentReader::at(const json& object, const char* key) {
  static const json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string ComponentReader::type_of(const json& component) {
  if (component.is_null()) return "null";
  const json& type = at(component, "type");
  return type.is_string() ? type.get<std::string>() : "a component without a type";
}

void ComponentReader::known_keys(const json& object, std::string_view name, std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : object.items()) {
    support(std::find(known.begin(), known.end(), key) != known.end(), message("key '{}' of {} is not supported", key, name));
  }
}

bool ComponentReader::flag(const json& object, const char* key, bool fallback) const {
  const json& value = at(object, key);
  if (value.is_null()) return fallback;
  require(value.is_boolean(), message("'{}' must be true or false; got {}", key, kind_of(value)));
  return value.get<bool>();
}

std::string ComponentReader::text(const json& object, const char* key, std::string_view name, bool may_be_empty) const {
  const json& value = at(object, key);
  require(value.is_string(), message("{} must have the string '{}'; got {}", name, key, kind_of(value)));
  const auto& out = value.get_ref<const std::string&>();
  support(out.size() <= kLongestPattern && (may_be_empty || !out.empty()),
          message("'{}' of {} must have {} to {} bytes; it has {}", key, name, may_be_empty ? 0 : 1, kLongestPattern, out.size()));
  return out;
}

std::string ComponentReader::character(const json& object, const char* key, std::string_view name) const {
  std::string out = text(object, key, name, false);
  support(unicode::length_at(out) == out.size(), message("'{}' of {} must be one character; got '{}'", key, name, out));
  return out;
}

std::size_t ComponentReader::count(const json& object, const char* key, std::string_view name) const {
  const json& value = at(object, key);
  require(value.is_number_unsigned(),
          message("'{}' of {} must be a whole number of at least 0; got {}", key, name, kind_of(value)));
  return value.get<std::size_t>();
}

std::string ComponentReader::literal(const json& component, std::string_view name) const {
  const json& pattern = at(component, "pattern");
  const json& regex = at(pattern, "Regex");
  support(regex.is_null(), message("{} must have a String pattern; got the Regex {}", name, regex.dump().substr(0, 200)));
  return text(pattern, "String", name, false);
}

const json& ComponentReader::parts(const json& sequence, const char* key, std::string_view name) const {
  const json& out = at(sequence, key);
  require(out.is_array(), message("{}.{} must be an array", name, key));
  support(out.size() <= kMostSteps, message("{}.{} must be an array of at most {} components", name, key, kMostSteps));
  return out;
}

std::vector<TextStep> ComponentReader::normalizer(const json& component) const {
  std::vector<TextStep> out;
  if (!component.is_null()) add_normalizer(component, out);
  return out;
}

void ComponentReader::add_normalizer(const json& component, std::vector<TextStep>& out) const {
  const std::string type = type_of(component);
  if (type == "Sequence") {
    known_keys(component, "Sequence", {"type", "normalizers"});
    for (const json& part : parts(component, "normalizers", "normalizer")) add_normalizer(part, out);
  } else if (type == "Prepend") {
    known_keys(component, "Prepend", {"type", "prepend"});
    out.push_back({TextStep::Kind::kPrepend, {}, text(component, "prepend", "Prepend", true)});
  } else if (type == "Replace") {
    known_keys(component, "Replace", {"type", "pattern", "content"});
    out.push_back(
        {TextStep::Kind::kReplace, literal(component, "normalizer Replace"), text(component, "content", "Replace", true)});
  } else if (type == "NFC") {
    known_keys(component, "NFC", {"type"});
    out.push_back({TextStep::Kind::kNfc, {}, {}});
  } else {
    support(false, message("normalizer may contain only Sequence, Prepend, Replace and NFC; got {}", type));
  }
  support(out.size() <= kMostSteps, message("normalizer may have at most {} steps; it has more", kMostSteps));
}

PreTokenizer ComponentReader::pre_tokenizer(const json& component) const {
  PreTokenizer out;
  if (component.is_null()) return out;
  if (type_of(component) != "Sequence") {
    add_pre_tokenizer(component, out);
    return out;
  }
  known_keys(component, "Sequence", {"type", "pretokenizers"});
  for (const json& part : parts(component, "pretokenizers", "pre_tokenizer")) add_pre_tokenizer(part, out);
  return out;
}

void ComponentReader::add_pre_tokenizer(const json& component, PreTokenizer& out) const {
  const std::string type = type_of(component);
  support(!out.byte_level, message("no pre_tokenizer may follow ByteLevel; got {}", type));
  if (type == "Split") return add_split(component, out);
  if (type == "Metaspace") return add_metaspace(component, out);
  if (type == "ByteLevel") return add_byte_level(component, out);
  support(type == "Digits", message("pre_tokenizer may contain only Split, Digits, Metaspace and ByteLevel; got {}", type));
  known_keys(component, "Digits", {"type", "individual_digits"});
  out.splits.push_back({flag(component, "individual_digits", false) ? Split::kIndividualDigits : Split::kContiguousDigits});
}

void ComponentReader::add_byte_level(const json& component, PreTokenizer& out) const {
  known_keys(component, "ByteLevel", {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  out.byte_level = true;
  if (flag(component, "add_prefix_space", true)) {
    support(out.splits.empty() && !out.marker, "ByteLevel(add_prefix_space=true) after another pre_tokenizer is not supported");
    out.marker = {" ", PrependScheme::kAlways};
  }
  if (flag(component, "use_regex", true)) out.splits.push_back({Split::kGpt2});
}

PrependScheme ComponentReader::prepend_scheme(const json& metaspace) const {
  const json& scheme = at(metaspace, "prepend_scheme");
  const bool prefix = flag(metaspace, "add_prefix_space", true);
  require(scheme.is_null() || scheme == "never" || scheme == "first" || scheme == "always",
          message("Metaspace.prepend_scheme must be never, first or always; got {}", scheme.dump().substr(0, 200)));
  support(prefix || scheme == "never", "Metaspace(add_prefix_space=false) must have prepend_scheme never");
  return scheme == "never" ? PrependScheme::kNever : scheme == "first" ? PrependScheme::kFirst : PrependScheme::kAlways;
}

void ComponentReader::add_metaspace(const json& component, PreTokenizer& out) const {
  known_keys(component, "Metaspace", {"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  support(out.splits.empty() && !out.marker, "Metaspace after another pre_tokenizer is not supported");
  const std::string marker = character(component, "replacement", "Metaspace");
  out.marker = {marker, prepend_scheme(component)};
  if (flag(component, "split", true)) out.splits.push_back({Split::kBeforeDelimiter, unicode::decode(marker)[0].value});
}

void ComponentReader::add_split(const json& component, PreTokenizer& out) const {
  known_keys(component, "Split", {"type", "pattern", "behavior", "invert"});
  const bool invert = flag(component, "invert", false);
  const json& behavior = at(component, "behavior");
  const json& regex = at(at(component, "pattern"), "Regex");
  if (!regex.is_null()) return add_split_on_regex(regex, behavior, invert, out);
  support(!invert, "Split on a character must not be inverted");
  const uint32_t delimiter = unicode::decode(character(at(component, "pattern"), "String", "the pattern of Split"))[0].value;
  if (behavior == "MergedWithPrevious") return out.splits.push_back({Split::kAfterDelimiter, delimiter});
  if (behavior == "MergedWithNext") return out.splits.push_back({Split::kBeforeDelimiter, delimiter});
  if (behavior == "Contiguous" && delimiter == '\n') {  // runs of line feeds, and what is between them
    std::string why;
    return out.splits.push_back({Split::kPattern, 0, SplitPattern::parse("\\n+", why)});
  }
  support(behavior == "Isolated",
          message("Split on a character must have behavior MergedWithPrevious, MergedWithNext or Isolated; got {}",
                  behavior.dump().substr(0, 200)));
  out.splits.push_back({Split::kAroundDelimiter, delimiter});
}

void ComponentReader::add_split_on_regex(const json& regex, const json& behavior, bool invert, PreTokenizer& out) const {
  require(regex.is_string(), "the pattern of Split must be a String or a Regex");
  // Isolated keeps the matches and what is between them, inverted or not. Removed and inverted, which converters of tiktoken write, keeps
  // the matches.
  const bool matches_only = behavior == "Removed" && invert;
  support(behavior == "Isolated" || matches_only,
          message("Split on a Regex must have behavior Isolated, or Removed with invert; got {}{}", behavior.dump().substr(0, 200),
                  invert ? " with invert" : ""));
  for (const Split split : {Split::kLlama3, Split::kQwen2, Split::kGpt2}) {
    if (regex == pattern_of(split)) return out.splits.push_back({split});  // it matches every text as a whole
  }
  const auto& expression = regex.get_ref<const std::string&>();
  std::string why;
  auto pattern = SplitPattern::parse(expression, why);
  support(pattern != nullptr, message("the pattern of Split is not supported: {}; got {}", why, expression.substr(0, 200)));
  out.splits.push_back({matches_only ? Split::kMatches : Split::kPattern, 0, std::move(pattern)});
}

DecoderDescription ComponentReader::decoder(const json& component) const {
  DecoderDescription out;
  add_decoder(component, out.steps);
  out.byte_level = out.steps.size() == 1 && out.steps[0].kind == DecodeStep::Kind::kByteLevel;
  return out;
}

void ComponentReader::add_decoder(const json& component, std::vector<DecodeStep>& out) const {
  using Kind = DecodeStep::Kind;
  const std::string type = type_of(component);
  if (type == "Sequence") {
    known_keys(component, "Sequence", {"type", "decoders"});
    for (const json& part : parts(component, "decoders", "decoder")) add_decoder(part, out);
  } else if (type == "ByteLevel") {
    out.push_back({Kind::kByteLevel});
  } else if (type == "ByteFallback") {
    out.push_back({Kind::kByteFallback});
  } else if (type == "Fuse") {
    out.push_back({Kind::kFuse});
  } else if (type == "Replace") {
    known_keys(component, "Replace", {"type", "pattern", "content"});
    out.push_back({Kind::kReplace, literal(component, "decoder Replace"), text(component, "content", "Replace", true)});
  } else if (type == "Strip") {
    known_keys(component, "Strip", {"type", "content", "start", "stop"});
    out.push_back({Kind::kStrip,
                   character(component, "content", "Strip"),
                   {},
                   count(component, "start", "Strip"),
                   count(component, "stop", "Strip")});
  } else if (type == "Metaspace") {
    known_keys(component, "Metaspace", {"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
    const std::size_t dropped = prepend_scheme(component) == PrependScheme::kNever ? 0 : 1;
    out.push_back({Kind::kMetaspace, character(component, "replacement", "Metaspace"), {}, dropped});
  } else {
    support(false, message("decoder may contain only Sequence, ByteLevel, Metaspace, Replace, ByteFallback, Fuse and Strip; got {}",
                           type));
  }
  support(out.size() <= kMostSteps, message("decoder may have at most {} steps; it has more", kMostSteps));
}

}  // namespace qlorapp
