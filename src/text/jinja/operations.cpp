// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "builtins.hpp"
#include "core/check.hpp"
#include "text_methods.hpp"

namespace qlorapp::jinja {
namespace {

constexpr int64_t kLongestRange = 100'000;  // as in Jinja's sandbox

/// at + step; where that overflows, the end of all numbers.
int64_t stepped(int64_t at, int64_t step) {
  int64_t out = 0;
  if (!__builtin_add_overflow(at, step, &out)) return out;
  return step > 0 ? INT64_MAX : INT64_MIN;
}

Value dict_method(const Value& object, std::string_view name) {
  const auto part = [&](bool keys, bool values, const char* view) {
    return Value(Function([object, keys, values, view](const Arguments&) {
                   List out;
                   for (const auto& [key, value] : object.dict()->entries)
                     out.push_back(keys && values ? Value(List{key, value}, true) : keys ? key : value);
                   return Value(Sequence{std::move(out), false, view});
                 }),
                 &object);
  };
  if (name == "items") return part(true, true, "dict_items");
  if (name == "keys") return part(true, false, "dict_keys");
  if (name == "values") return part(false, true, "dict_values");
  if (name == "copy") return Value(Function([object](const Arguments&) { return object; }), &object);
  if (name == "get") {
    const auto get = [object](const Arguments& arguments) {
      if (arguments.values.empty()) throw Failure("get expected at least 1 argument, got 0");
      if (const Value* const found = object.dict()->look_up(arguments.values[0])) return *found;
      return arguments.values.size() > 1 ? arguments.values[1] : Value(Value::None{});
    };
    return Value(Function(get), &object);
  }
  return {};
}

Value list_method(const Value& object, std::string_view name) {
  if (name != "index" && name != "count") return {};
  const auto find = [object, count = name == "count"](const Arguments& arguments) {
    if (arguments.values.size() != 1) throw Failure("it takes exactly one argument");
    const List& items = object.sequence()->items;
    const Value& one = arguments.values[0];
    if (count) return Value(static_cast<int64_t>(std::count(items.begin(), items.end(), one)));
    const auto at = std::find(items.begin(), items.end(), one);
    if (at == items.end()) throw Failure(message("{} is not in list", one.repr()));
    return Value(static_cast<int64_t>(at - items.begin()));
  };
  return Value(Function(find), &object);
}

Value loop_attribute(const Loop& loop, std::string_view name) {
  const std::size_t size = loop.items->items.size(), i = loop.index;
  if (name == "index") return i + 1;
  if (name == "index0") return i;
  if (name == "revindex") return size - i;
  if (name == "revindex0") return size - i - 1;
  if (name == "first") return i == 0;
  if (name == "last") return i + 1 == size;
  if (name == "length") return size;
  if (name == "depth") return 1;  // of loops that call themselves, which are not computed here
  if (name == "depth0") return 0;
  if (name == "previtem") return i > 0 ? loop.items->items[i - 1] : Value::undefined("there is no previous item");
  if (name == "nextitem") return i + 1 < size ? loop.items->items[i + 1] : Value::undefined("there is no next item");
  if (name == "cycle") {
    return Function([i](const Arguments& arguments) {
      if (arguments.values.empty()) throw Failure("no items for cycling given");
      return arguments.values[i % arguments.values.size()];
    });
  }
  return {};
}

Value method_of(const Value& object, std::string_view name) {
  if (object.text() != nullptr) return text_method(object, name);
  if (object.dict() != nullptr) return dict_method(object, name);
  if (object.sequence() != nullptr) return list_method(object, name);
  return {};
}

Value missing(const Value& object, std::string_view name) {
  return Value::undefined(message("'{} object' has no attribute '{}'", object.type_name(), name));
}

void refuse_undefined(const Value& object, const Value& key) {
  if (object.is_undefined()) throw Failure(message("{} is undefined: it has no '{}'", object.what(), key.str()));
}

std::string formatted(const std::string& pattern, const Value& value) {
  std::string out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '%') {
      out += pattern[i];
      continue;
    }
    const char kind = ++i < pattern.size() ? pattern[i] : '\0';
    if (kind == '%') {
      out += '%';
      continue;
    }
    const bool many = value.sequence() != nullptr && value.sequence()->is_tuple;
    if (many ? next >= value.sequence()->items.size() : next > 0) throw Failure("not enough arguments for format string");
    const Value& one = many ? value.sequence()->items[next] : value;
    ++next;
    if (kind == 's') out += one.str();
    else if (kind == 'r') out += one.repr();
    else if (kind == 'd' || kind == 'i') out += std::to_string(one.whole());
    else throw Failure("of formats only %s, %r, %d and %i are computed here");
  }
  return out;
}

}  // namespace

Value attribute_of(const Value& object, std::string_view name) {
  refuse_undefined(object, name);
  if (object.loop() != nullptr) return loop_attribute(*object.loop(), name);
  if (const Value::Namespace* const space = object.space()) {
    const Value* const found = space->attributes.find(name);
    return found != nullptr ? *found : missing(object, name);
  }
  Value method = method_of(object, name);
  if (!method.is_undefined()) return method;
  if (object.dict() != nullptr) {
    if (const Value* const found = object.dict()->find(name)) return *found;
  }
  return missing(object, name);
}

Value item_of(const Value& object, const Value& key) {
  refuse_undefined(object, key);
  if (object.dict() != nullptr) {
    const Value* const found = object.dict()->look_up(key);
    if (found != nullptr) return *found;
  }
  int64_t index = 0;
  if (object.sequence() != nullptr && object.sequence()->taken != nullptr) return missing(object, key.str());
  if (key.as_integer(index) && (object.sequence() != nullptr || object.text() != nullptr)) {
    const int64_t size = object.length();
    if (index < 0) index += size;
    if (index < 0 || index >= size) return Value::undefined(message("{} has no element {}", object.type_name(), key.str()));
    if (object.sequence() != nullptr) return object.sequence()->items[static_cast<std::size_t>(index)];
    return characters(*object.text())[static_cast<std::size_t>(index)];
  }
  if (key.text() != nullptr) {
    if (object.dict() == nullptr) return attribute_of(object, *key.text());
    Value method = method_of(object, *key.text());
    if (!method.is_undefined()) return method;
  }
  return missing(object, key.str());
}

Value slice_of(const Value& object, const Value* from, const Value* to, const Value* step) {
  refuse_undefined(object, "[:]");
  if (object.sequence() == nullptr && object.text() == nullptr)
    throw Failure(message("'{}' object cannot be sliced", object.type_name()));
  const auto given = [](const Value* value) { return value != nullptr && !value->is_none(); };
  const int64_t size = object.length(), by = given(step) ? step->whole() : 1;
  if (by == 0) throw Failure("slice step cannot be zero");
  const auto place = [&](const Value* value, int64_t standard) {
    if (!given(value)) return standard;
    int64_t at = value->whole();
    if (at < 0) at = stepped(at, size);
    return std::clamp<int64_t>(at, by > 0 ? 0 : -1, by > 0 ? size : size - 1);
  };
  const int64_t begin = place(from, by > 0 ? 0 : size - 1), end = place(to, by > 0 ? size : -1);
  const std::vector<std::string_view> letters =
      object.text() != nullptr ? characters(*object.text()) : std::vector<std::string_view>();
  List items;
  std::string text;
  for (int64_t i = begin; by > 0 ? i < end : i > end; i = stepped(i, by)) {
    if (object.text() != nullptr) text += letters[static_cast<std::size_t>(i)];
    else items.push_back(object.sequence()->items[static_cast<std::size_t>(i)]);
  }
  if (object.text() != nullptr) return text;
  return Value(std::move(items), object.sequence()->is_tuple);
}

bool contains(const Value& all, const Value& one) {
  if (all.text() != nullptr) {
    if (one.text() == nullptr) throw Failure(message("'in <string>' requires string as left operand, not {}", one.type_name()));
    return all.text()->find(*one.text()) != std::string::npos;
  }
  if (all.dict() != nullptr) return all.dict()->look_up(one) != nullptr;
  const std::shared_ptr<const Sequence> items = all.iterated();
  return std::find(items->items.begin(), items->items.end(), one) != items->items.end();
}

Value computed(std::string_view sign, const Value& a, const Value& b) {
  int64_t x = 0, y = 0, out = 0;
  if (sign == "+" && a.text() != nullptr && b.text() != nullptr) {
    if (a.text()->size() + b.text()->size() > kLongestText) throw Failure("the text is too long");
    return *a.text() + *b.text();
  }
  if (sign == "+" && a.sequence() != nullptr && b.sequence() != nullptr && a.sequence()->is_tuple == b.sequence()->is_tuple) {
    List items = a.sequence()->items;
    items.insert(items.end(), b.sequence()->items.begin(), b.sequence()->items.end());
    if (items.size() > (std::size_t{1} << 20)) throw Failure("the list is too long");
    return Value(std::move(items), a.sequence()->is_tuple);
  }
  if (sign == "*" && (a.text() != nullptr || b.text() != nullptr)) {
    const Value& text = a.text() != nullptr ? a : b;
    if ((a.text() != nullptr ? b : a).as_integer(x)) {
      x = std::max<int64_t>(x, 0);
      if (!text.text()->empty() && static_cast<uint64_t>(x) > kLongestText / text.text()->size())
        throw Failure("the text is too long");
      std::string all;
      for (int64_t i = 0; i < x && !text.text()->empty(); ++i) all += *text.text();
      return all;
    }
  }
  if (sign == "%" && a.text() != nullptr) return formatted(*a.text(), b);
  if (!a.is_number() || !b.is_number()) {
    for (const Value* const value : {&a, &b}) refuse_undefined(*value, sign);
    throw Failure(message("unsupported operand type(s) for {}: '{}' and '{}'", sign, a.type_name(), b.type_name()));
  }
  const auto in_range = [](bool overflows) {
    if (overflows) throw Failure("a number goes beyond 64 bits");
  };
  if (a.as_integer(x) && b.as_integer(y) && sign != "/") {
    if (sign == "+") in_range(__builtin_add_overflow(x, y, &out));
    else if (sign == "-") in_range(__builtin_sub_overflow(x, y, &out));
    else if (sign == "*") in_range(__builtin_mul_overflow(x, y, &out));
    else if (sign == "**") {
      if (y < 0) return std::pow(static_cast<double>(x), static_cast<double>(y));
      if (y > 64 && x != 0 && x != 1 && x != -1) in_range(true);
      out = 1;
      for (int64_t i = 0, most = y > 64 ? y % 2 : y; i < most; ++i) in_range(__builtin_mul_overflow(out, x, &out));
      if (y > 64 && x == 0) out = 0;
    } else {
      if (y == 0) throw Failure("division by zero");
      if (y == -1) return sign == "//" ? computed("-", 0, x) : Value(0);
      const int64_t left = x % y, down = left != 0 && (left < 0) != (y < 0) ? 1 : 0;
      out = sign == "//" ? x / y - down : left + down * y;
    }
    return out;
  }
  const double u = a.as_real(), v = b.as_real();
  if (sign == "+") return u + v;
  if (sign == "-") return u - v;
  if (sign == "*") return u * v;
  if (sign == "**") return std::pow(u, v);
  if (v == 0) throw Failure("division by zero");
  if (sign == "/") return u / v;
  const double floor = std::floor(u / v);
  return sign == "//" ? floor : u - floor * v;
}

const Dict& global_functions() {
  static const Dict all = [] {
    const auto range = [](const Arguments& arguments) {
      const List& given = arguments.values;
      if (given.empty() || given.size() > 3) throw Failure("range expected 1 to 3 arguments");
      const int64_t begin = given.size() > 1 ? given[0].whole() : 0, end = given[given.size() > 1 ? 1 : 0].whole(),
                    step = given.size() > 2 ? given[2].whole() : 1;
      if (step == 0) throw Failure("range() arg 3 must not be zero");
      List out;
      for (int64_t i = begin; step > 0 ? i < end : i > end; i = stepped(i, step)) {
        out.emplace_back(i);
        if (out.size() > kLongestRange) throw Failure(message("a range may have {} numbers", kLongestRange));
      }
      return Value(std::move(out));
    };
    const auto dict_of = [](const Arguments& arguments) {
      Dict out;
      if (arguments.values.size() > 1 || (arguments.values.size() == 1 && arguments.values[0].dict() == nullptr))
        throw Failure("dict() and namespace() are computed here for a dict and names");
      if (!arguments.values.empty()) out = *arguments.values[0].dict();
      for (const auto& [key, value] : arguments.named) out.set(key, value);
      return out;
    };
    Dict out;
    const auto add = [&](const char* name, Function function) { out.entries.emplace_back(name, std::move(function)); };
    add("range", range);
    add("dict", [dict_of](const Arguments& arguments) { return Value(dict_of(arguments)); });
    add("namespace", [dict_of](const Arguments& arguments) {
      const auto space = std::make_shared<Value::Namespace>();
      for (const auto& [key, value] : dict_of(arguments).entries) {
        if (key.text() == nullptr) throw Failure("the names of a namespace are texts");
        space->set(*key.text(), value);
      }
      return Value(space);
    });
    add("raise_exception", [](const Arguments& arguments) -> Value {
      const Value* const text = arguments.find(0, "message");
      throw Failure(text != nullptr ? text->str() : "");
    });
    return out;
  }();
  return all;
}

}  // namespace qlorapp::jinja
