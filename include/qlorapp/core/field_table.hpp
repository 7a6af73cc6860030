// SPDX-License-Identifier: Apache-2.0
/// One table describes a config: its JSON form, command-line flags, Python dataclass, validation and docs come from it.
///
/// A config is a plain struct with default member initializers (the defaults have no other home) and
///     static constexpr auto fields() { return FieldTable{Field{"r", &LoraConfig::r, "rank of the update"}, …}; }
/// Member types: bool, int64_t, double, std::string, vectors of those, std::map<std::string, int64_t or double>, std::optional and
/// std::variant of those, NamesOrPattern (core/names_or_pattern.hpp) and FreeForm (core/free_form.hpp). Every visitor knows all of
/// them. A config with other spellings also has static constexpr aliases(), a range of Alias. A big table can be written in parts:
/// base structs with tables of their own, which stand in the table like fields: FieldTable{Base::fields(), Field{…}, …}.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

namespace qlorapp {

template <class Config, class Value>
struct Field {
  std::string_view name;
  Value Config::*member;
  std::string_view doc;
};
template <class Config, class Value>
Field(const char*, Value Config::*, const char*) -> Field<Config, Value>;

/// Another spelling that is understood.
struct Alias {
  std::string_view alias;
  std::string_view name;
  bool older = false;  ///< The former name: its use is logged, with the new name.
};
inline constexpr bool kOlder = true;

namespace detail {

template <size_t i, class Entry>
struct TableEntry {
  Entry entry;
};
template <class Places, class... Entries>
struct TableEntries;
template <size_t... i, class... Entries>
struct TableEntries<std::index_sequence<i...>, Entries...> : TableEntry<i, Entries>... {
  template <class Visit>
  constexpr void each(Visit& visit) const {
    (visit(static_cast<const TableEntry<i, Entries>&>(*this).entry), ...);
  }
};

}  // namespace detail

/// Fields, and tables of fields, in order. A std::tuple of a hundred fields takes a compiler half a minute in each file that
/// visits them.
template <class... Entries>
struct FieldTable : detail::TableEntries<std::index_sequence_for<Entries...>, Entries...> {
  constexpr FieldTable(const Entries&... entries)
      : detail::TableEntries<std::index_sequence_for<Entries...>, Entries...>{{entries}...} {}
};

namespace detail {

template <class Visit>
struct VisitFields {
  Visit& visit;
  template <class Config, class Value>
  constexpr void operator()(const Field<Config, Value>& field) const {
    visit(field);
  }
  template <class... Entries>
  constexpr void operator()(const FieldTable<Entries...>& table) const {
    table.each(*this);
  }
};

}  // namespace detail

/// Calls visit(field) for each field in the order of the table.
template <class Config, class Visit>
constexpr void for_each_field(Visit&& visit) {
  detail::VisitFields<Visit>{visit}(Config::fields());
}

/// The names in the order of the table, for nearest_name().
template <class Config>
constexpr auto field_names() {
  constexpr size_t count = [] {
    size_t n = 0;
    for_each_field<Config>([&](const auto&) { ++n; });
    return n;
  }();
  std::array<std::string_view, count> names;
  for_each_field<Config>([&, i = size_t{0}](const auto& field) mutable { names[i++] = field.name; });
  return names;
}

}  // namespace qlorapp
