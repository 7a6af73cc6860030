// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/adapters/lora_config.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <regex>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "format/config_json.hpp"
#include "json/python_json.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

const std::vector<std::string>& default_targets() {
  static const std::vector<std::string> targets(format::kUsualTargets.begin(), format::kUsualTargets.end());
  return targets;
}

std::regex compiled(std::string_view option, const std::string& pattern) {
  try {
    return std::regex(pattern, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    throw ValueError(message("[LoraConfig] {} must be a regular expression; got '{}' ({}).", option, pattern, error.what()));
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
    const std::regex expression = compiled("layers_pattern", message("(?:.*?\\.)??{}\\.(\\d+)\\.", pattern));
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
    if (!match_whole(name, compiled(option, message("(.*\\.)?({})", key)))) continue;
    QLORAPP_CHECK_VALUE(chosen == nullptr || own == value,
                        "[LoraConfig] {} has two values for {}: '{}' says {}, '{}' says {}. Make one of them narrower.", option,
                        name, *chosen, value, key, own);
    chosen = &key;
    value = own;
  }
  return value;
}

std::string in_lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

constexpr std::string_view kPissaNiter = "pissa_niter_";

/// PEFT's names for initializations that need more than the weights, and what each needs.
constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kRefusedInits{
    {{"eva", "it decomposes activations of a data set before training"},
     {"corda", "it decomposes covariances of a data set before training"},
     {"lora_ga", "it decomposes gradients of the base weights, which a four-bit base does not have"},
     {"mica", "it trains A alone and freezes B"}}};

std::optional<LoraInit> init_of(const std::variant<bool, std::string>& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag ? LoraInit::kUniform : LoraInit::kRandom;
  const std::string name = in_lower_case(std::get<std::string>(value));
  if (name == "gaussian") return LoraInit::kGaussian;
  if (name == "orthogonal") return LoraInit::kOrthogonal;
  if (name == "olora") return LoraInit::kOlora;
  if (name == "loftq") return LoraInit::kLoftq;
  if (name == "pissa") return LoraInit::kPissa;
  if (name.starts_with(kPissaNiter) && number_in(std::string_view(name).substr(kPissaNiter.size()))) return LoraInit::kPissa;
  return std::nullopt;
}

void check_init(const LoraConfig& config) {
  const std::optional<LoraInit> init = init_of(config.init_lora_weights);
  if (!init) {
    const std::string& name = std::get<std::string>(config.init_lora_weights);
    for (const auto& [refused, reason] : kRefusedInits) {
      QLORAPP_CHECK_VALUE(name != refused,
                          "[LoraConfig] init_lora_weights='{}' is not supported: {}. Use true, 'orthogonal' or 'pissa'.", name,
                          reason);
    }
    throw ValueError(
        message("[LoraConfig] init_lora_weights must be true, false, 'gaussian', 'orthogonal', 'loftq', 'pissa', 'pissa_niter_N' "
                "or 'olora'; got {}.",
                printable(name)));
  }
  if (*init == LoraInit::kOrthogonal) {
    const auto even = [](int64_t rank) {
      QLORAPP_CHECK_VALUE(rank % 2 == 0, "[LoraConfig] init_lora_weights='orthogonal' needs even ranks; got {}.", rank);
    };
    even(config.r);
    for (const auto& [key, rank] : config.rank_pattern) even(rank);
  }
  if (*init == LoraInit::kLoftq) (void)config.loftq_rounds();
  if (*init != LoraInit::kLoftq && config.loftq_config != LoraConfig{}.loftq_config) {
    log_warning_once("[LoraConfig] loftq_config has no effect: init_lora_weights is not 'loftq'");
  }
  const bool from_weights = *init == LoraInit::kOlora || *init == LoraInit::kPissa || *init == LoraInit::kLoftq;
  QLORAPP_CHECK_VALUE(!(from_weights && config.use_dora),
                      "[LoraConfig] use_dora needs an initialization that leaves the base as it is. Use init_lora_weights=true.");
}

void check_bias(const std::string& bias) {
  QLORAPP_CHECK_VALUE(bias == "none" || bias == "all" || bias == "lora_only",
                      "[LoraConfig] bias must be 'none', 'all' or 'lora_only'; got {}.", printable(bias));
}

/// PEFT's rule for modules_to_save: a plain end, without a dot before it.
bool ends_with_any(std::string_view name, const std::vector<std::string>& ends) {
  return std::any_of(ends.begin(), ends.end(), [&](const std::string& end) { return !end.empty() && name.ends_with(end); });
}

/// Keys of adapter_config.json that its own reader keeps as they are, and that are fields here.
constexpr std::array<const char*, 7> kKeptKeys{"exclude_modules", "layers_pattern", "layers_to_transform", "bias",
                                               "modules_to_save", "use_dora",       "ensure_weight_tying"};

}  // namespace

void LoraConfig::validate() const {
  check_init(*this);
  to_adapter_config(*this).check();  // r, lora_alpha, lora_dropout, the patterns' values
  check_bias(bias);
  QLORAPP_CHECK_VALUE(peft_type == "LORA", "[LoraConfig] peft_type must be 'LORA'; got {}.", printable(peft_type));
  QLORAPP_CHECK_VALUE(!task_type || *task_type == "CAUSAL_LM", "[LoraConfig] task_type must be 'CAUSAL_LM'; got '{}'.",
                      task_type.value_or(""));
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
    QLORAPP_CHECK_VALUE(layer >= 0, "[LoraConfig] layers_to_transform must be indices from 0 up; got {}.", layer);
  }
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

bool LoraConfig::saves(std::string_view module_name) const {
  return modules_to_save && ends_with_any(module_name, *modules_to_save);
}

bool LoraConfig::targets_all_linear() const { return is_all_linear(target_modules); }

std::vector<std::string> LoraConfig::unmatched_targets(const std::vector<std::string>& module_names) const {
  std::vector<std::string> unmatched;
  for (const std::string& target : target_modules.names) {
    const bool found = std::any_of(module_names.begin(), module_names.end(),
                                   [&](const std::string& name) { return name == target || ends_at_dot(name, target); });
    if (!found) unmatched.push_back(target);
  }
  return unmatched;
}

LoraInit LoraConfig::init() const { return init_of(init_lora_weights).value(); }

std::optional<int64_t> LoraConfig::pissa_iterations() const {
  const std::string name = in_lower_case(std::get<std::string>(init_lora_weights));
  return name.starts_with(kPissaNiter) ? number_in(std::string_view(name).substr(kPissaNiter.size())) : std::nullopt;
}

int64_t LoraConfig::loftq_rounds() const {
  const format::Json json = format::parse_json(loftq_config.json, "loftq_config");
  QLORAPP_CHECK_VALUE(json.is_object(), "[LoraConfig] loftq_config must be an object; got {}.", loftq_config.json);
  int64_t rounds = 1;
  for (const auto& [key, value] : json.items()) {
    QLORAPP_CHECK_VALUE(value.is_number_integer(), "[LoraConfig] loftq_config.{} must be an integer; got {}.", printable(key),
                        value.dump());
    if (key == "loftq_iter") {
      rounds = value.get<int64_t>();
    } else if (key == "loftq_bits") {
      QLORAPP_CHECK_VALUE(value == 4, "[LoraConfig] loftq_config.loftq_bits must be 4, as the base is; got {}.", value.dump());
    } else {
      throw ValueError(message("[LoraConfig] loftq_config has no key {}. It has loftq_bits and loftq_iter.", printable(key)));
    }
  }
  QLORAPP_CHECK_VALUE(rounds >= 1, "[LoraConfig] loftq_config.loftq_iter must be at least 1; got {}.", rounds);
  return rounds;
}

LoraConfig LoraConfig::for_model(const format::ModelConfig& model) const {
  LoraConfig own = *this;
  const auto targets = model.family->lora_targets;
  if (own.target_modules.empty()) own.target_modules.names.assign(targets.begin(), targets.end());
  return own;
}

LoraConfig LoraConfig::for_text_of(const format::ModelConfig& model) const {
  LoraConfig own = for_model(model);
  const std::string body = model.body();
  const auto is_whole = [&](const std::string& name) { return name.starts_with(body); };
  const bool all = targets_all_linear();
  std::vector<std::string> names = all ? format::linear_words(model) : own.target_modules.names;
  const bool fits = std::all_of(names.begin(), names.end(), is_whole);  // also a regular expression, which has no names
  if (model.wrapper == nullptr || fits || (layers_pattern && !is_listed(*layers_pattern, "layers"))) return own;
  const auto escaped = [](std::string_view text) {
    std::string pattern;
    for (const char c : text)
      pattern += std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' ? std::string(1, c) : std::string{'\\', c};
    return pattern;
  };
  const auto one_of = [](const std::vector<std::string>& parts) {
    std::string pattern;
    for (const std::string& part : parts) pattern += (pattern.empty() ? "" : "|") + part;
    return message("(?:{})", pattern);
  };
  std::vector<std::string> whole, words, layers;
  for (const std::string& name : names) (is_whole(name) ? whole : words).push_back(escaped(name));
  for (const int64_t layer : layers_to_transform.value_or(std::vector<int64_t>{})) layers.push_back(std::to_string(layer));
  const std::string in_layers = layers.empty() ? "" : message("layers\\.{}\\.", one_of(layers));
  whole.push_back(message("{}{}(?:.*\\.)?{}", escaped(body), in_layers, one_of(words)));
  own.target_modules = NamesOrPattern();
  own.target_modules.pattern = whole.size() == 1 ? whole.front() : one_of(whole);
  own.layers_to_transform.reset();
  own.layers_pattern.reset();
  return own;
}

bool LoraConfig::same_shape(const LoraConfig& other) const {
  const auto targets = [](const LoraConfig& config) {
    std::vector<std::string> names = config.target_modules.empty() ? default_targets() : config.target_modules.names;
    std::sort(names.begin(), names.end());
    return std::pair(names, config.target_modules.pattern);
  };
  return r == other.r && lora_alpha == other.lora_alpha && use_rslora == other.use_rslora && targets(*this) == targets(other) &&
         use_dora == other.use_dora && modules_to_save == other.modules_to_save &&
         ensure_weight_tying == other.ensure_weight_tying && exclude_modules == other.exclude_modules &&
         layers_to_transform == other.layers_to_transform && layers_pattern == other.layers_pattern &&
         rank_pattern == other.rank_pattern && alpha_pattern == other.alpha_pattern;
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
  switch (config.init()) {
    case LoraInit::kGaussian:
      file.init_lora_weights = "gaussian";
      break;
    case LoraInit::kOrthogonal:
      file.init_lora_weights = "orthogonal";
      break;
    case LoraInit::kRandom:
      file.init_lora_weights = "false";
      break;
    // Those that took a part out of the base have done so: PEFT would take it out of the base that remains once more.
    default:
      file.init_lora_weights = "true";
  }
  file.task_type = config.task_type;
  file.revision = config.revision;
  const format::Json json = format::to_json(config);
  for (const char* key : kKeptKeys) {
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
  config.base_model_name_or_path = file.base_model_name_or_path;
  config.revision = file.revision;
  config.peft_version = file.peft_version;
  config.inference_mode = file.inference_mode;
  format::Json json = format::Json::object();
  for (const char* key : kKeptKeys) {
    if (const auto kept = file.preserved.find(key); kept != file.preserved.end()) json[key] = format::parse_json(kept->second, key);
  }
  format::from_json(json, config, "adapter_config.json");
  config.validate();
  return config;
}

}  // namespace qlorapp
