// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_config.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <regex>

#include <nlohmann/json.hpp>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/field_status.hpp"
#include "qlorapp/format/config_json.hpp"
#include "qlorapp/format/python_json.hpp"

namespace qlorapp {
namespace {

/// PEFT's choice for Llama, Mistral, Gemma and Qwen.
const std::vector<std::string>& default_targets() {
  static const std::vector<std::string> targets{"q_proj", "v_proj"};
  return targets;
}

std::regex compiled(std::string_view option, const std::string& pattern) {
  try {
    return std::regex(pattern, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    throw ValueError(concat("[LoraConfig] ", option, " must be a regular expression; got '", pattern, "' (", error.what(), ")."));
  }
}

bool match_whole(std::string_view name, const std::regex& pattern) { return std::regex_match(name.begin(), name.end(), pattern); }

bool is_all_linear(const NamesOrPattern& modules) {
  constexpr std::string_view kWord = "all-linear";
  return modules.pattern && std::equal(modules.pattern->begin(), modules.pattern->end(), kWord.begin(), kWord.end(),
                                       [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; });
}

/// "q_proj" ends "model.layers.0.self_attn.q_proj" at a dot; "proj" does not.
bool ends_at_dot(std::string_view name, std::string_view end) {
  return name.size() > end.size() && name.ends_with(end) && name[name.size() - end.size() - 1] == '.';
}

bool is_listed(const std::vector<std::string>& list, std::string_view name) {
  return std::any_of(list.begin(), list.end(), [&](const std::string& entry) { return name == entry || ends_at_dot(name, entry); });
}

std::optional<int64_t> number_in(std::string_view digits) {
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = !digits.empty() && digits.front() != '-' && error == std::errc{} && stop == digits.data() + digits.size();
  return whole ? std::optional(value) : std::nullopt;
}

/// The first part of the name that is a number, has two parts or more before it and one behind it.
std::optional<int64_t> layer_index(std::string_view name) {
  size_t begin = 0;
  for (int parts_before = 0;; ++parts_before) {
    const size_t dot = name.find('.', begin);
    if (dot == std::string_view::npos) return std::nullopt;
    const auto number = number_in(name.substr(begin, dot - begin));
    if (parts_before >= 2 && number) return number;
    begin = dot + 1;
  }
}

std::optional<int64_t> layer_index(std::string_view name, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    const std::regex expression = compiled("layers_pattern", concat("(?:.*?\\.)??", pattern, "\\.(\\d+)\\."));
    std::match_results<std::string_view::const_iterator> found;
    if (std::regex_search(name.begin(), name.end(), found, expression, std::regex_constants::match_continuous)) {
      return number_in(found[found.size() - 1].str());  // the pattern may have groups of its own before it
    }
  }
  return std::nullopt;
}

template <class Value>
Value value_for(std::string_view option, const std::map<std::string, Value>& pattern, std::string_view name, Value otherwise) {
  const std::string* chosen = nullptr;
  Value value = otherwise;
  for (const auto& [key, own] : pattern) {
    if (!match_whole(name, compiled(option, concat("(.*\\.)?(", key, ")")))) continue;
    QLORAPP_CHECK_VALUE(chosen == nullptr || own == value, "[LoraConfig] ", option, " has two values for ", name, ": '", *chosen,
                        "' says ", value, ", '", key, "' says ", own, ". Make one of them narrower.");
    chosen = &key;
    value = own;
  }
  return value;
}

void check_init(const std::variant<bool, std::string>& init) {
  const auto* name = std::get_if<std::string>(&init);
  QLORAPP_CHECK_VALUE(name == nullptr ? std::get<bool>(init) : *name == "gaussian",
                      "[LoraConfig] init_lora_weights must be true or 'gaussian'; got ",
                      name == nullptr ? "false" : "'" + *name + "'",
                      ". Others change the base weights or begin away from the base model.");
}

}  // namespace

void LoraConfig::validate() const {
  to_adapter_config(*this).check();  // r, lora_alpha, lora_dropout, the patterns' values
  check_init(init_lora_weights);
  QLORAPP_CHECK_VALUE(bias == "none", "[LoraConfig] bias must be 'none'; got '", bias, "'. Base biases stay frozen.");
  QLORAPP_CHECK_VALUE(!task_type || *task_type == "CAUSAL_LM", "[LoraConfig] task_type must be 'CAUSAL_LM'; got '",
                      task_type.value_or(""), "'.");
  QLORAPP_CHECK_VALUE(!target_modules.pattern || !target_modules.pattern->empty(),
                      "[LoraConfig] target_modules must not be an empty string.");
  QLORAPP_CHECK_VALUE(
      !(target_modules.pattern && layers_to_transform),
      "[LoraConfig] `layers_to_transform` cannot be used when `target_modules` is a str. Name the modules in a list.");
  QLORAPP_CHECK_VALUE(!(target_modules.pattern && layers_pattern),
                      "[LoraConfig] `layers_pattern` cannot be used when `target_modules` is a str. Name the modules in a list.");
  QLORAPP_CHECK_VALUE(!layers_pattern || layers_pattern->empty() || layers_to_transform,
                      "[LoraConfig] When `layers_pattern` is specified, `layers_to_transform` must also be specified.");
  for (const int64_t layer : layers_to_transform.value_or(std::vector<int64_t>{})) {
    QLORAPP_CHECK_VALUE(layer >= 0, "[LoraConfig] layers_to_transform must be indices from 0 up; got ", layer, '.');
  }
  apply_field_status(*this, "LoraConfig");
  // Regular expressions are tried on a name, so that a broken one is found here and not in the middle of a model.
  if (target_modules.pattern && !is_all_linear(target_modules)) (void)compiled("target_modules", *target_modules.pattern);
  if (exclude_modules.pattern) (void)compiled("exclude_modules", *exclude_modules.pattern);
  for (const std::string& pattern : layers_pattern.value_or(std::vector<std::string>{})) (void)compiled("layers_pattern", pattern);
  for (const auto& [key, rank] : rank_pattern) (void)compiled("rank_pattern", key);
  for (const auto& [key, alpha] : alpha_pattern) (void)compiled("alpha_pattern", key);
}

bool LoraConfig::matches(std::string_view module_name, std::string_view output_head) const {
  if (exclude_modules.pattern) {
    if (!exclude_modules.pattern->empty() && match_whole(module_name, compiled("exclude_modules", *exclude_modules.pattern)))
      return false;
  } else if (is_listed(exclude_modules.names, module_name)) {
    return false;
  }
  if (is_all_linear(target_modules)) return module_name != output_head;
  if (target_modules.pattern) return match_whole(module_name, compiled("target_modules", *target_modules.pattern));

  const std::vector<std::string>& names = target_modules.names.empty() ? default_targets() : target_modules.names;
  if (std::find(names.begin(), names.end(), module_name) != names.end()) return true;  // whole: whatever its layer
  if (!is_listed(names, module_name)) return false;
  if (!layers_to_transform || layers_to_transform->empty()) return true;
  const bool found_by_itself = !layers_pattern || layers_pattern->empty();
  const auto index = found_by_itself ? layer_index(module_name) : layer_index(module_name, *layers_pattern);
  return index && std::find(layers_to_transform->begin(), layers_to_transform->end(), *index) != layers_to_transform->end();
}

int64_t LoraConfig::rank_of(std::string_view module_name) const { return value_for("rank_pattern", rank_pattern, module_name, r); }

double LoraConfig::alpha_of(std::string_view module_name) const {
  return value_for("alpha_pattern", alpha_pattern, module_name, lora_alpha);
}

double LoraConfig::scaling_of(std::string_view module_name) const {
  const auto rank = static_cast<double>(rank_of(module_name));
  return alpha_of(module_name) / (use_rslora ? std::sqrt(rank) : rank);
}

bool LoraConfig::gaussian_init() const {
  const auto* name = std::get_if<std::string>(&init_lora_weights);
  return name != nullptr && *name == "gaussian";
}

bool LoraConfig::same_shape(const LoraConfig& other) const {
  const auto targets = [](const LoraConfig& config) {
    std::vector<std::string> names = config.target_modules.empty() ? default_targets() : config.target_modules.names;
    std::sort(names.begin(), names.end());
    return std::pair(names, config.target_modules.pattern);
  };
  return r == other.r && lora_alpha == other.lora_alpha && use_rslora == other.use_rslora && targets(*this) == targets(other) &&
         exclude_modules == other.exclude_modules && layers_to_transform == other.layers_to_transform &&
         layers_pattern == other.layers_pattern && rank_pattern == other.rank_pattern && alpha_pattern == other.alpha_pattern;
}

format::AdapterConfig to_adapter_config(const LoraConfig& config) {
  format::AdapterConfig file;
  file.r = config.r;
  file.lora_alpha = config.lora_alpha;
  file.lora_dropout = config.lora_dropout;
  file.use_rslora = config.use_rslora;
  file.target_modules = config.target_modules.empty() ? default_targets() : config.target_modules.names;
  file.target_pattern = config.target_modules.pattern;
  file.rank_pattern = config.rank_pattern;
  file.alpha_pattern = config.alpha_pattern;
  file.init_lora_weights = config.gaussian_init() ? "gaussian" : "true";
  file.task_type = config.task_type;
  const format::Json json = format::to_json(config);
  for (const char* key : {"exclude_modules", "layers_pattern", "layers_to_transform"}) {
    if (!json[key].is_null()) file.preserved[key] = format::dump_python_json(json[key]);
  }
  return file;
}

LoraConfig from_adapter_config(const format::AdapterConfig& file) {
  LoraConfig config;
  config.r = file.r;
  config.lora_alpha = file.lora_alpha;
  config.lora_dropout = file.lora_dropout;
  config.use_rslora = file.use_rslora;
  config.target_modules.names = file.target_modules;
  config.target_modules.pattern = file.target_pattern;
  config.rank_pattern = file.rank_pattern;
  config.alpha_pattern = file.alpha_pattern;
  if (file.init_lora_weights == "gaussian") config.init_lora_weights = "gaussian";  // others differ only before training
  config.task_type = file.task_type;
  format::Json json = format::Json::object();
  for (const char* key : {"exclude_modules", "layers_pattern", "layers_to_transform"}) {
    if (const auto kept = file.preserved.find(key); kept != file.preserved.end()) json[key] = format::parse_json(kept->second, key);
  }
  format::from_json(json, config, "adapter_config.json");
  config.validate();
  return config;
}

}  // namespace qlorapp
