// SPDX-License-Identifier: Apache-2.0
/// What an expression of a template is worth: Python's values, as far as templates have them. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "text/json_reading.hpp"

namespace qlorapp::jinja {

/// No text is longer, or a short template could fill the memory.
inline constexpr std::size_t kLongestText = std::size_t{64} << 20;

/// The template raised, or asks for what Python refuses. Internal: Template::render() makes a ValueError of it.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Value;
using List = std::vector<Value>;

struct Sequence {
  List items;
  bool is_tuple = false;
  const char* view = nullptr;             ///< "dict_items" …: how Python writes what a dict's method gives.
  int depth = 1;                          ///< Of what it holds, as that of Dict: Value sets and bounds it.
  std::shared_ptr<bool> taken = nullptr;  ///< Of what Python makes lazily (map, select …): it is there once, and has no length.
};

/// In the order of insertion.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int depth = 1;
  [[nodiscard]] const Value* find(std::string_view key) const;
  [[nodiscard]] const Value* look_up(const Value& key) const;
  void set(std::string_view key, Value value);
};

/// What a loop's `loop` tells. `items` outlives it.
struct Loop {
  std::shared_ptr<const Sequence> items;
  std::size_t index = 0;
};

struct Arguments {
  List values;
  std::vector<std::pair<std::string, Value>> named;

  /// The argument at a position or of a name; null if it is not given.
  [[nodiscard]] const Value* find(std::size_t position, std::string_view name) const;
};
using Function = std::function<Value(const Arguments&)>;
struct Callable {
  Function call;
  int depth = 1;  ///< Of the values that it holds.
};

class Value {
 public:
  struct Undefined {
    std::shared_ptr<const std::string> what;  ///< Of a message; may be null.
  };
  struct None {};
  using Text = std::shared_ptr<const std::string>;
  struct Namespace {
    Dict attributes;
    /// @throws Failure beyond 200 levels.
    void set(std::string_view key, Value value);
  };

  Value() : data_(Undefined{}) {}
  Value(None) : data_(None{}) {}
  Value(bool value) : data_(value) {}
  Value(int value) : data_(int64_t{value}) {}
  Value(int64_t value) : data_(value) {}
  Value(std::size_t value) : data_(static_cast<int64_t>(value)) {}
  Value(double value) : data_(value) {}
  Value(std::string text) : data_(std::make_shared<const std::string>(std::move(text))) {}
  Value(std::string_view text) : Value(std::string(text)) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(List items, bool is_tuple = false) : Value(Sequence{std::move(items), is_tuple}) {}
  /// @throws Failure for lists and dicts in each other beyond 200 levels, which the stack could not follow.
  Value(Sequence sequence);
  Value(Dict dict);
  /// @param holds  what the function holds beside Jinja's own.
  Value(Function function, const Value* holds = nullptr);
  Value(Loop loop) : data_(std::make_shared<const Loop>(std::move(loop))) {}
  Value(std::shared_ptr<Namespace> space) : data_(std::move(space)) {}
  [[nodiscard]] static Value undefined(std::string what);
  /// A text that outlives the value and its copies: a long one is not copied.
  [[nodiscard]] static Value borrowed(const std::string& text) {
    Value out;
    out.data_ = Text(Text(), &text);
    return out;
  }
  /// @throws Failure for a number beyond int64, which Python would write in full.
  [[nodiscard]] static Value of(const Row& json);

  [[nodiscard]] bool is_undefined() const { return std::holds_alternative<Undefined>(data_); }
  [[nodiscard]] bool is_none() const { return std::holds_alternative<None>(data_); }
  [[nodiscard]] bool is_number() const { return boolean() != nullptr || integer() != nullptr || real() != nullptr; }
  [[nodiscard]] const bool* boolean() const { return std::get_if<bool>(&data_); }
  [[nodiscard]] const int64_t* integer() const { return std::get_if<int64_t>(&data_); }
  [[nodiscard]] const double* real() const { return std::get_if<double>(&data_); }
  [[nodiscard]] const std::string* text() const { return pointed<Text>(); }
  [[nodiscard]] const Sequence* sequence() const { return pointed<std::shared_ptr<const Sequence>>(); }
  [[nodiscard]] const Dict* dict() const { return pointed<std::shared_ptr<const Dict>>(); }
  [[nodiscard]] const Loop* loop() const { return pointed<std::shared_ptr<const Loop>>(); }
  [[nodiscard]] const Function* function() const {
    const Callable* const held = pointed<std::shared_ptr<const Callable>>();
    return held != nullptr ? &held->call : nullptr;
  }
  [[nodiscard]] Namespace* space() const {
    const auto* const held = std::get_if<std::shared_ptr<Namespace>>(&data_);
    return held != nullptr ? held->get() : nullptr;
  }
  [[nodiscard]] std::shared_ptr<Namespace> shared_space() const {
    const auto* const held = std::get_if<std::shared_ptr<Namespace>>(&data_);
    return held != nullptr ? *held : nullptr;
  }
  /// The shared sequence itself, which a loop keeps.
  [[nodiscard]] std::shared_ptr<const Sequence> shared_sequence() const {
    const auto* const held = std::get_if<std::shared_ptr<const Sequence>>(&data_);
    return held != nullptr ? *held : nullptr;
  }

  [[nodiscard]] bool truth() const;
  /// As Python's str(); "" of an undefined one.
  [[nodiscard]] std::string str() const;
  /// As Python's repr().
  [[nodiscard]] std::string repr() const;
  /// Of an undefined one: what is not there, for a message.
  [[nodiscard]] std::string what() const;
  /// "str", "dict" …: how Python names the type.
  [[nodiscard]] std::string_view type_name() const;
  /// The numbers as Python's arithmetic sees them. @pre is_number()
  [[nodiscard]] double as_real() const;
  /// true for a bool or an integer. @param out  its value.
  [[nodiscard]] bool as_integer(int64_t& out) const;
  /// The same, and nothing else. @throws Failure as Python.
  [[nodiscard]] int64_t whole() const;

  /// The items that a loop goes over: keys of a dict, characters of a text; none of an undefined one. @throws Failure.
  [[nodiscard]] std::shared_ptr<const Sequence> iterated() const;
  /// As Python's len(). @throws Failure.
  [[nodiscard]] int64_t length() const;

  /// @throws Failure where Python cannot compare.
  [[nodiscard]] static bool less(const Value& a, const Value& b);
  friend bool operator==(const Value& a, const Value& b);
  /// How deep lists, dicts, namespaces and functions stand in each other.
  [[nodiscard]] int depth() const;

 private:
  template <class Pointer>
  [[nodiscard]] auto pointed() const -> const typename Pointer::element_type* {
    const auto* const held = std::get_if<Pointer>(&data_);
    return held != nullptr ? held->get() : nullptr;
  }

  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<const Sequence>, std::shared_ptr<const Dict>,
               std::shared_ptr<Namespace>, std::shared_ptr<const Callable>, std::shared_ptr<const Loop>>
      data_;
};

struct JsonStyle {
  bool ascii = false, sorted = false;
  int indent = -1;  ///< Negative: in one line.
  std::string between = ", ", behind_key = ": ";
};
/// As Python's json.dumps(). @throws Failure for a value that JSON has not.
[[nodiscard]] std::string json_of(const Value& value, const JsonStyle& style);

/// As Python writes a float.
[[nodiscard]] std::string written(double value);

/// The characters of a text, which Python counts and cuts.
[[nodiscard]] std::vector<std::string_view> characters(std::string_view text);
/// Lets operator== and less() compare so many values from here on in this thread; then they throw Failure. Lists can hold each other twice.
void allow_comparisons(int64_t count);
[[nodiscard]] int64_t character_count(std::string_view text);

}  // namespace qlorapp::jinja
