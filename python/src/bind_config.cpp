// SPDX-License-Identifier: Apache-2.0
// Field tables, from which Python makes its dataclasses.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/nearest_name.hpp"
#include "qlorapp/format/config_json.hpp"
#include "qlorapp/nn/lora_config.hpp"
#include "qlorapp/nn/parameter_count.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp::python {
namespace {

/// A member's type as Python spells it.
std::string spelt(const bool*) { return "bool"; }
std::string spelt(const int64_t*) { return "int"; }
std::string spelt(const double*) { return "float"; }
std::string spelt(const std::string*) { return "str"; }
std::string spelt(const NamesOrPattern*) { return "list[str] | str | None"; }
template <class Value>
std::string spelt(const std::vector<Value>*) {
  return concat("list[", spelt(static_cast<const Value*>(nullptr)), "]");
}
template <class Value>
std::string spelt(const std::map<std::string, Value>*) {
  return concat("dict[str, ", spelt(static_cast<const Value*>(nullptr)), "]");
}
template <class Value>
std::string spelt(const std::optional<Value>*) {
  return concat(spelt(static_cast<const Value*>(nullptr)), " | None");
}
template <class First, class... Values>
std::string spelt(const std::variant<First, Values...>*) {
  return concat(spelt(static_cast<const First*>(nullptr)), concat(" | ", spelt(static_cast<const Values*>(nullptr)))...);
}

std::string spelt(FieldStatus status) {
  return status == FieldStatus::kUsed ? "used" : status == FieldStatus::kRefused ? "refused" : "accepted_and_said";
}

/// [(name, type, default as JSON, doc, status, reason)]
template <class Config>
py::list fields() {
  py::list rows;
  const format::Json defaults = format::to_json(Config{});
  for_each_field<Config>([&](const auto& field) {
    using Member = std::remove_cvref_t<decltype(std::declval<Config>().*field.member)>;
    const std::string name(field.name);
    rows.append(py::make_tuple(name, spelt(static_cast<const Member*>(nullptr)), defaults[name].dump(), std::string(field.doc),
                               spelt(field.status), std::string(field.reason)));
  });
  return rows;
}

template <class Config>
std::map<std::string, std::string> aliases() {
  std::map<std::string, std::string> names;
  for (const Alias& alias : Config::aliases()) names.emplace(alias.alias, alias.name);
  return names;
}

template <class Config>
void check(const std::string& json, const std::string& where) {
  Config config;
  format::from_json(format::parse_json(json, where), config, where);
  config.validate();
}

std::string suggest(const std::string& name, const std::vector<std::string>& known) {
  const std::vector<std::string_view> views(known.begin(), known.end());
  return did_you_mean(name, views);
}

py::tuple count(const std::string& config_json, const std::string& lora_json) {
  LoraConfig lora;
  format::from_json(format::parse_json(lora_json, "LoraConfig"), lora, "LoraConfig");
  const ParameterCount count = count_parameters(format::parse_model_config(config_json, "config.json"), lora);
  return py::make_tuple(count.trainable, count.all);
}

}  // namespace

void bind_config(py::module_& m) {
  m.def("lora_config_fields", &fields<LoraConfig>, "[(name, type, default as JSON, doc, status, reason)]");
  m.def("lora_config_aliases", &aliases<LoraConfig>);
  m.def(
      "check_lora_config", [](const std::string& json) { check<LoraConfig>(json, "LoraConfig"); }, py::arg("json"));
  m.def("training_arguments_fields", &fields<TrainingArguments>, "[(name, type, default as JSON, doc, status, reason)]");
  m.def("training_arguments_aliases", &aliases<TrainingArguments>);
  m.def(
      "check_training_arguments", [](const std::string& json) { check<TrainingArguments>(json, "TrainingArguments"); },
      py::arg("json"));
  m.def("did_you_mean", &suggest, py::arg("name"), py::arg("known"), "\" Did you mean 'x'?\", or nothing.");
  m.def("count_parameters", &count, py::arg("config_json"), py::arg("lora_config_json"),
        "(trainable, all), from the configs alone.");
  m.def(
      "trainable_parameters_line",
      [](int64_t trainable, int64_t all) {
        return trainable_parameters_line({trainable, all});
      },
      py::arg("trainable"), py::arg("all"));
}

}  // namespace qlorapp::python
