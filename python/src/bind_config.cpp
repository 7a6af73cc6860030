// SPDX-License-Identifier: Apache-2.0
// Field tables, from which Python makes its dataclasses.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "core/check.hpp"
#include "format/config_json.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/adapters/parameter_count.hpp"
#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/bits_and_bytes_config.hpp"
#include "qlorapp/train/precision.hpp"
#include "qlorapp/train/schedule.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "train/qlora_defaults.hpp"

namespace qlorapp::python {
namespace {

/// A member's type as Python spells it.
std::string spelled(const bool*) { return "bool"; }
std::string spelled(const int64_t*) { return "int"; }
std::string spelled(const double*) { return "float"; }
std::string spelled(const std::string*) { return "str"; }
std::string spelled(const FreeForm*) { return "dict | str | None"; }
std::string spelled(const NamesOrPattern*) { return "list[str] | str | None"; }
template <class Value>
std::string spelled(const std::vector<Value>*) {
  return message("list[{}]", spelled(static_cast<const Value*>(nullptr)));
}
template <class Value>
std::string spelled(const std::map<std::string, Value>*) {
  return message("dict[str, {}]", spelled(static_cast<const Value*>(nullptr)));
}
template <class Value>
std::string spelled(const std::optional<Value>*) {
  return message("{} | None", spelled(static_cast<const Value*>(nullptr)));
}
template <class First, class... Values>
std::string spelled(const std::variant<First, Values...>*) {
  std::string text = spelled(static_cast<const First*>(nullptr));
  ((text += " | " + spelled(static_cast<const Values*>(nullptr))), ...);
  return text;
}

/// [(name, type, default as JSON, doc)]
template <class Config>
py::list fields() {
  py::list rows;
  const format::Json defaults = format::to_json(Config{});
  for_each_field<Config>([&](const auto& field) {
    using Member = std::remove_cvref_t<decltype(std::declval<Config>().*field.member)>;
    const std::string name(field.name);
    rows.append(py::make_tuple(name, spelled(static_cast<const Member*>(nullptr)), defaults[name].dump(), std::string(field.doc)));
  });
  return rows;
}

template <class Config>
std::map<std::string, std::pair<std::string, bool>> aliases() {
  std::map<std::string, std::pair<std::string, bool>> names;
  for (const Alias& alias : Config::aliases()) names.emplace(alias.alias, std::pair<std::string, bool>(alias.name, alias.older));
  return names;
}

template <class Config>
void check(const std::string& json, const std::string& where) {
  Config config;
  format::from_json(format::parse_json(json, where), config, where);
  config.validate();
}

py::tuple count(const std::string& config_json, const std::string& lora_json) {
  LoraConfig lora;
  format::from_json(format::parse_json(lora_json, "LoraConfig"), lora, "LoraConfig");
  const ParameterCount count = count_parameters(format::parse_model_config(config_json, "config.json"), lora);
  return py::make_tuple(count.trainable, count.all);
}

}  // namespace

void bind_config(py::module_& m) {
  m.def("lora_config_fields", &fields<LoraConfig>, "[(name, type, default as JSON, doc)]");
  m.def("lora_config_aliases", &aliases<LoraConfig>, "{alias: (name, whether it is an older one)}");
  m.def("bits_and_bytes_config_fields", &fields<format::BitsAndBytesConfig>, "[(name, type, default as JSON, doc)]");
  m.def("bits_and_bytes_config_aliases", &aliases<format::BitsAndBytesConfig>);
  m.def("training_arguments_fields", &fields<TrainingArguments>, "[(name, type, default as JSON, doc)]");
  m.def(
      "command_defaults", [] { return qlora_defaults().dump(); },
      "JSON: the defaults of the command that differ from these tables");
  m.def("training_arguments_aliases", &aliases<TrainingArguments>);
  m.def(
      "check_training_arguments", [](const std::string& json) { check<TrainingArguments>(json, "TrainingArguments"); },
      py::arg("json"));
  m.def("native_architectures", [] {
    std::vector<std::string> names;
    for (const format::Family& family : format::families()) names.emplace_back(family.architecture);
    return names;
  });
  m.def(
      "wrapped_architectures",
      [] {
        std::vector<std::string> names;
        for (const format::Family& family : format::families()) {
          for (const format::Wrapper& wrapper : family.wrappers) names.emplace_back(wrapper.architecture);
        }
        return names;
      },
      "Of checkpoints whose part for text is of a native family.");
  m.def(
      "config_fields",
      [] {
        std::vector<std::tuple<std::string, std::string, double, double, bool, std::string>> fields;
        for (const format::ConfigField& field : format::config_fields()) {
          constexpr std::array<const char*, 3> kTypes{"int", "float", "bool"};
          fields.emplace_back(field.key, kTypes[field.member.index()], field.least, field.most, field.required, field.doc);
        }
        return fields;
      },
      "[(key of config.json, type, least, most, whether it is required, doc)]");
  m.def(
      "why_unsupported",
      [](const std::string& config_json) -> std::string {
        try {
          static_cast<void>(format::parse_model_config(config_json, "config.json"));
        } catch (const format::UnsupportedModel& error) { return error.what(); } catch (const Error&) {
        }  // which loading tells
        return "";
      },
      py::arg("config_json"), "The line that refuses a sound config that the engine does not compute; empty if there is none.");
  m.def("config_keys", &format::computed_keys, "The keys of config.json that determine a native family's results.");
  m.def("warmup_steps", &count_warmup_steps, py::arg("warmup_steps"), py::arg("warmup_ratio"), py::arg("training_steps"));
  m.def(
      "say_older_name",
      [](const std::string& where, const std::string& alias, const std::string& name) {
        format::say_older_name(where, alias, name);
      },
      py::arg("where"), py::arg("alias"), py::arg("name"), "Once in a process.");
  m.def(
      "log_warning_once", [](const std::string& line) { log_warning_once(line); }, py::arg("line"));
  m.def(
      "mixed_precision",
      [](const std::string& gpu, int major, int minor) {
        const Precision precision = mixed_precision_for({major, minor});
        return py::make_tuple(std::string(to_string(precision)), describe_mixed_precision(gpu, precision));
      },
      py::arg("gpu"), py::arg("major"), py::arg("minor"), "(\"bf16\" or \"fp16\", the line that says so)");
  m.def("count_parameters", &count, py::arg("config_json"), py::arg("lora_config_json"),
        "(trainable, all), from the configs alone.");
}

}  // namespace qlorapp::python
