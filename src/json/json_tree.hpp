// SPDX-License-Identifier: Apache-2.0
/// Values built from a parser's events, for readers with rules of their own (any JSON; rows of data), and taken apart without asking for
/// memory: the JSON library's own destructor asks for some, and ends the program if there is none.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace qlorapp::format {

/// Empties a value.
template <class json>
void dismantle(json& value) {
  if (value.is_array()) {
    auto& list = value.template get_ref<typename json::array_t&>();
    for (; !list.empty(); list.pop_back()) dismantle(list.back());
  } else if (value.is_object()) {
    auto& object = value.template get_ref<typename json::object_t&>();
    for (auto& [key, each] : object) dismantle(each);
    object.clear();
  }
}

/// Dismantles a value at the end of a block.
template <class json>
class DismantledAtEnd {
 public:
  explicit DismantledAtEnd(json& value) : value_(value) {}
  ~DismantledAtEnd() { dismantle(value_); }
  DismantledAtEnd(const DismantledAtEnd&) = delete;
  DismantledAtEnd& operator=(const DismantledAtEnd&) = delete;

 private:
  json& value_;
};

/// A value while it is read. Its callers check depth, keys and values, and say what is wrong in their own words.
/// @tparam json  nlohmann::json or nlohmann::ordered_json.
template <class json>
class JsonTree {
 public:
  JsonTree() = default;
  ~JsonTree() { dismantle(root_); }
  JsonTree(const JsonTree&) = delete;
  JsonTree& operator=(const JsonTree&) = delete;

  json take() { return std::move(root_); }
  /// Objects and lists that are open.
  [[nodiscard]] size_t depth() const { return open_.size(); }
  /// Keys of the innermost object.
  [[nodiscard]] size_t keys() const { return keys_.back().size(); }

  /// The next value is that of this key. @returns false if the object has it already.
  bool add_key(const std::string& name) {
    if (!keys_.back().insert(name).second) return false;
    auto& object = open_.back()->template get_ref<typename json::object_t&>();
    // Straight to the end of the vector: an ordered map's own insertion compares with every key, which a hostile file turns into hours.
    if constexpr (requires { object.emplace_back(name, nullptr); }) {
      slot_ = &object.emplace_back(name, nullptr).second;
    } else {
      slot_ = &object[name];
    }
    return true;
  }
  void put(json&& value) { (void)place(std::move(value)); }
  void open(json&& container) {
    open_.push_back(place(std::move(container)));
    keys_.emplace_back();
  }
  void close() {
    keys_.pop_back();
    open_.pop_back();
  }

 private:
  /// Into the root, the last key's value, or a new element. Pointers to open containers stay valid: a parent grows again only after its
  /// child was closed.
  json* place(json&& value) {
    json* into = &root_;
    if (!open_.empty()) {
      json& parent = *open_.back();
      into = parent.is_object() ? slot_ : &parent.template get_ref<typename json::array_t&>().emplace_back();
    }
    *into = std::move(value);
    return into;
  }

  json root_, *slot_ = nullptr;
  std::vector<json*> open_;
  std::vector<std::set<std::string>> keys_;  ///< Of each that is open.
};

}  // namespace qlorapp::format
