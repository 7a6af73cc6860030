// SPDX-License-Identifier: Apache-2.0
#include "json_reading.hpp"

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "core/check.hpp"
#include "format/file_reader.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

template <class json>
json parse(std::string_view text, const std::string& where, std::size_t most_keys) {
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  using Event = typename json::parse_event_t;
  const typename json::parser_callback_t watch = [&](int depth, Event event, json& parsed) {
    if (event == Event::object_start || event == Event::array_start) {
      QLORAPP_CHECK_FORMAT(depth < kJsonDepth,
                           "[{}] JSON may be nested at most {} levels deep; this is deeper. Check the program that wrote the file.",
                           where, kJsonDepth);
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) {
      const auto& key = parsed.template get_ref<const std::string&>();
      QLORAPP_CHECK_FORMAT(keys.back().insert(key).second,
                           "[{}] a key must be unique in a JSON object; '{}' appears twice. Remove one.", where, key);
      QLORAPP_CHECK_FORMAT(
          keys.back().size() <= most_keys,
          "[{}] an object of a row may have at most {} keys; this one has more. Check the program that wrote the file.", where,
          most_keys);
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const typename json::exception& error) {
    std::string reason = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: …"
    if (const auto end = reason.find("] "); end != std::string::npos) reason.erase(0, end + 2);
    std::string readable;  // the reason quotes what was read, which may be long or no UTF-8
    unicode::append_lossy(readable, std::string_view(reason).substr(0, 200));
    throw FormatError(message("[{}] must be valid JSON in UTF-8; {}. Check the program that wrote the file.", where, readable));
  }
}

template <class json>
std::string_view kind(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return "null";
    case json::value_t::object:
      return "an object";
    case json::value_t::array:
      return "an array";
    case json::value_t::string:
      return "a string";
    case json::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) { return parse<nlohmann::json>(text, where, SIZE_MAX); }
Row parse_row(std::string_view text, const std::string& where) { return parse<Row>(text, where, kMostRowKeys); }

std::string read_file(const std::string& path, size_t limit) { return format::FileReader(path).read_all(limit); }
std::string read_file_inside(const std::string& path, size_t limit) {
  return format::FileReader::open_inside(path).read_all(limit);
}

std::string_view kind_of(const nlohmann::json& value) { return kind(value); }
std::string_view kind_of(const Row& value) { return kind(value); }

std::vector<std::string> keys_of(const Row& row) {
  std::vector<std::string> out;
  for (const auto& [key, value] : row.items()) {
    if (!value.is_null()) out.push_back(key);
  }
  return out;
}

const Row& require(const Row& row, const std::string& key, const std::string& where) {
  QLORAPP_CHECK_FORMAT(row.is_object(), "[{}] a row must be a JSON object; got {}. Write one object per row.", where, kind_of(row));
  const auto found = row.find(key);
  QLORAPP_CHECK_FORMAT(found != row.end(),
                       "[{}] a row must have key '{}', as the first row has; got keys {}. Rename the key, or remove the row.",
                       where, key, joined(keys_of(row)));
  return *found;
}

const std::string& require_text(const Row& row, const std::string& key, const std::string& where) {
  const Row& value = require(row, key, where);
  QLORAPP_CHECK_FORMAT(value.is_string(), "[{}] '{}' must be a string; got {}. {}", where, key, kind_of(value),
                       value.is_array() && key != "content" ? "Conversations go into 'messages'." : "Correct or remove the row.");
  return value.get_ref<const std::string&>();
}

}  // namespace qlorapp
