// SPDX-License-Identifier: Apache-2.0
#include "json_reading.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "files/file_reader.hpp"
#include "json/json_tree.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

struct Limits {
  std::size_t keys = SIZE_MAX;    ///< Of an object.
  std::size_t values = SIZE_MAX;  ///< In all.
  bool packs = false;             ///< Lists of ids of the outermost object.
};

TextPlace place_behind(std::string_view text, TextPlace at) {
  for (const char c : text) {
    at.column += (static_cast<uint8_t>(c) & 0xC0) == 0x80 ? 0 : 1;
    if (c == '\n') at = {at.line + 1, 1};
  }
  return at;
}

/// A text that is there as a whole.
class WholeText {
 public:
  WholeText(std::string_view text, TextPlace begin) : text_(text), begin_(begin) {}
  [[nodiscard]] auto begin() const { return text_.begin(); }
  [[nodiscard]] auto end() const { return text_.end(); }
  [[nodiscard]] TextPlace place_of(std::size_t byte) const { return place_behind(text_.substr(0, byte), begin_); }

 private:
  std::string_view text_;
  TextPlace begin_;
};

/// A text that comes in parts, and is read once.
class TextInParts {
 public:
  TextInParts(const std::function<std::string_view()>& next, TextPlace begin) : next_(next), begin_(begin), last_(begin) {}

  struct Iterator {
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;
    TextInParts* text;  ///< Null at the end.
    const char *at, *stop;
    const char& operator*() const { return *at; }
    Iterator& operator++() {
      if (++at == stop) *this = text->next();
      return *this;
    }
    bool operator==(const Iterator& other) const { return text == other.text; }
  };
  Iterator begin() { return next(); }
  static Iterator end() { return {}; }

  /// @param byte  of the present part, or the one before it.
  [[nodiscard]] TextPlace place_of(std::size_t byte) const {
    return byte < read_ ? last_ : place_behind(part_.substr(0, byte - read_), begin_);
  }

 private:
  Iterator next() {
    if (!part_.empty()) {
      last_ = place_behind(part_.substr(0, part_.size() - 1), begin_);
      begin_ = place_behind(part_.substr(part_.size() - 1), last_);
      read_ += part_.size();
    }
    part_ = next_();
    if (part_.empty()) return {};
    return {this, part_.data(), part_.data() + part_.size()};
  }

  const std::function<std::string_view()>& next_;
  std::string_view part_;
  std::size_t read_ = 0;  ///< Bytes before the part.
  TextPlace begin_;       ///< Of the part.
  TextPlace last_;        ///< Of the byte before it.
};

/// Builds a value of the parser's events.
template <class json, class Text>
class Builder {
 public:
  Builder(const Text& text, const std::string& where, Limits limits) : text_(text), where_(where), limits_(limits) {}

  json take() { return tree_.take(); }

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(int64_t value) { return (is_packing_ && value >= INT32_MIN && pack(value)) || put(value); }
  bool number_unsigned(uint64_t value) {
    return (is_packing_ && value <= INT32_MAX && pack(static_cast<int64_t>(value))) || put(value);
  }
  bool number_float(double value, const std::string&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(std::vector<uint8_t>&) { return false; }

  bool start_object(std::size_t) { return open(json::object()); }
  bool key(std::string& name) {
    QLORAPP_CHECK_FORMAT(tree_.add_key(name), "[{}] a key must be unique in a JSON object; '{}' appears twice. Remove one.", where_,
                         name);
    QLORAPP_CHECK_FORMAT(tree_.keys() <= limits_.keys,
                         "[{}] an object of a row may have at most {} keys; this one has more. Check the program that wrote the "
                         "file.",
                         where_, limits_.keys);
    holds_ids_ = limits_.packs && tree_.depth() == 1 && (name == "input_ids" || name == "labels" || name == "attention_mask");
    return true;
  }
  bool end_object() { return close(); }
  bool start_array(std::size_t) {
    if (holds_ids_ && tree_.depth() == 1 && !is_packing_) {
      is_packing_ = true;
      return true;
    }
    return open(json::array());
  }
  bool end_array() {
    if (!is_packing_) return close();
    is_packing_ = false;
    packed_.shrink_to_fit();
    return put(json::binary(std::move(packed_)));
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) {
    std::string_view reason = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: …"
    if (const auto end = reason.find(": "); end != std::string_view::npos) reason.remove_prefix(end + 2);
    std::string readable;  // the reason quotes what was read, which may be long or no UTF-8
    unicode::append_lossy(readable, reason.substr(0, 200));
    const TextPlace at = text_.place_of(position > 0 ? position - 1 : 0);
    throw FormatError(message("[{}] must be valid JSON in UTF-8; line {}, column {}: {}. Check the program that wrote the file.",
                              where_, at.line, at.column, readable));
  }

 private:
  bool pack(int64_t id) {
    QLORAPP_CHECK_FORMAT(packed_.size() < kMostRowIds * sizeof(int32_t),
                         "[{}] a row may have at most {} token ids; this one has more. Split it into several rows.", where_,
                         kMostRowIds);
    const auto bytes = std::bit_cast<std::array<uint8_t, 4>>(static_cast<int32_t>(id));
    packed_.insert(packed_.end(), bytes.begin(), bytes.end());
    return true;
  }
  /// The list holds something else: what it has so far becomes an ordinary one.
  void unpack() {
    is_packing_ = false;
    const std::vector<uint8_t> packed = std::exchange(packed_, {});
    open(json::array());
    const PackedIds ids(packed);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0) put(int64_t{ids[i]});
      else put(static_cast<uint64_t>(ids[i]));
    }
  }
  void count() {
    QLORAPP_CHECK_FORMAT(++values_ <= limits_.values,
                         "[{}] a row may have at most {} values; this one has more. Split it into several rows.", where_,
                         limits_.values);
  }
  bool put(json&& value) {
    if (is_packing_) unpack();
    count();
    tree_.put(std::move(value));
    return true;
  }
  bool open(json&& container) {
    if (is_packing_) unpack();
    QLORAPP_CHECK_FORMAT(tree_.depth() < kJsonDepth,
                         "[{}] JSON may be nested at most {} levels deep; this is deeper. Check the program that wrote the file.",
                         where_, kJsonDepth);
    count();
    tree_.open(std::move(container));
    return true;
  }
  bool close() {
    tree_.close();
    return true;
  }

  const Text& text_;
  const std::string& where_;
  const Limits limits_;
  std::size_t values_ = 0;
  format::JsonTree<json> tree_;
  bool holds_ids_ = false, is_packing_ = false;
  std::vector<uint8_t> packed_;
};

template <class json, class Text>
json parse(Text text, const std::string& where, Limits limits) {
  Builder<json, Text> builder(text, where, limits);
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

template <class json>
std::string_view kind(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return "null";
    case json::value_t::object:
      return "an object";
    case json::value_t::array:
    case json::value_t::binary:  // ids
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

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  return parse<nlohmann::json>(WholeText(text, {}), where, {});
}
Row parse_row(std::string_view text, const std::string& where, bool packs_ids, TextPlace begin) {
  return parse<Row>(WholeText(text, begin), where, {kMostRowKeys, kMostRowValues, packs_ids});
}
Row parse_row(const std::function<std::string_view()>& next, const std::string& where, bool packs_ids, TextPlace begin) {
  return parse<Row>(TextInParts(next, begin), where, {kMostRowKeys, kMostRowValues, packs_ids});
}

std::optional<PackedIds> packed_ids(const Row& value) {
  if (!value.is_binary()) return std::nullopt;
  return PackedIds(value.get_binary());
}

std::string read_file(const std::string& path, size_t limit) { return files::FileReader(path).read_all(limit); }
std::string read_file_inside(const std::string& path, size_t limit) { return files::FileReader::open_inside(path).read_all(limit); }

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
