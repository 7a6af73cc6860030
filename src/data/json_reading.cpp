// SPDX-License-Identifier: Apache-2.0
#include "json_reading.hpp"

#include <unordered_set>
#include <vector>

#include "qlorapp/core/check.hpp"
#include "qlorapp/format/file_reader.hpp"
#include "unicode.hpp"

namespace qlorapp {

namespace {

template <class Json>
Json parse(std::string_view text, const std::string& where) {
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  const typename Json::parser_callback_t watch = [&](int depth, typename Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
      QLORAPP_CHECK_FORMAT(depth < kJsonDepth, "[", where, "] JSON may be nested ", kJsonDepth,
                           " levels deep; this is deeper. Check what wrote the file.");
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = parsed.template get_ref<const std::string&>();
      QLORAPP_CHECK_FORMAT(keys.back().insert(key).second, "[", where, "] a key may stand once in a JSON object; '", key,
                           "' is there twice. Remove one of the two.");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const typename Json::exception& error) {
    std::string reason = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: …"
    if (const auto end = reason.find("] "); end != std::string::npos) reason.erase(0, end + 2);
    std::string readable;  // the reason quotes what was read, which may be long or no UTF-8
    unicode::append_lossy(readable, std::string_view(reason).substr(0, 200));
    throw FormatError(concat("[", where, "] must be valid JSON in UTF-8; ", readable, ". Check what wrote the file."));
  }
}

std::string_view name_of(nlohmann::json::value_t type) {
  switch (type) {
    case nlohmann::json::value_t::null:
      return "null";
    case nlohmann::json::value_t::object:
      return "an object";
    case nlohmann::json::value_t::array:
      return "an array";
    case nlohmann::json::value_t::string:
      return "a string";
    case nlohmann::json::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) { return parse<nlohmann::json>(text, where); }

Row parse_row(std::string_view text, const std::string& where) { return parse<Row>(text, where); }

std::string read_file(const std::string& path, size_t limit) { return format::FileReader(path).read_all(limit); }

std::string_view kind_of(const nlohmann::json& value) { return name_of(value.type()); }

std::string_view kind_of(const Row& value) { return name_of(value.type()); }

}  // namespace qlorapp
