// SPDX-License-Identifier: Apache-2.0
/// Jinja's filters and tests, and Python's methods of texts, lists and dicts, as far as templates of conversations have them. Torch-free.
#pragma once

#include <string_view>

#include "value.hpp"

namespace qlorapp::jinja {

/// @pre has_filter(), has_test(). @throws Failure.
[[nodiscard]] Value filtered(std::string_view name, const Value& value, const Arguments& arguments);
[[nodiscard]] bool tested(std::string_view name, const Value& value, const Arguments& arguments);

/// object.name, and object[key]; undefined where there is none. @throws Failure of an undefined object.
[[nodiscard]] Value attribute_of(const Value& object, std::string_view name);
[[nodiscard]] Value item_of(const Value& object, const Value& key);
/// object[from:to:step]. @param from, to, step  null where absent.
[[nodiscard]] Value slice_of(const Value& object, const Value* from, const Value* to, const Value* step);

/// As Python's `in`.
[[nodiscard]] bool contains(const Value& all, const Value& one);
/// a + b, a * b … by its sign: + - * / // % **
[[nodiscard]] Value computed(std::string_view sign, const Value& a, const Value& b);

/// Functions that every template has: range, namespace, dict, raise_exception.
[[nodiscard]] const Dict& global_functions();

}  // namespace qlorapp::jinja
