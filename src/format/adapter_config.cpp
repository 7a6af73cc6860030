// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/adapter_config.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/nearest_name.hpp"
#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "format/adapter_use.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::format {
namespace {

constexpr size_t kMaxAdapterConfigBytes = size_t{16} << 20;
constexpr const char* kFileName = "adapter_config.json";
constexpr const char* kFingerprintKey = "qlorapp_base_fingerprint";

/// PEFT's keys that are no fields here, with the value that PEFT writes by default. With a reason, any other value is refused;
/// without one, the value is kept: it changes nothing about a trained adapter, or adapters/lora_config.hpp reads it from there
/// (exclude_modules, layers_pattern, layers_to_transform, bias, modules_to_save, use_dora, ensure_weight_tying).
struct OtherKey {
  std::string_view key, default_json, reason;
  bool merges = false;  ///< Merging computes it (io/merge.hpp).
};
constexpr OtherKey kOtherKeys[] = {
    {"alora_invocation_tokens", "null", "activated LoRA is not supported"},
    {"arrow_config", "null", "Arrow routing is not supported"},
    {"auto_mapping", "null", ""},
    {"bias", "\"none\"", ""},
    {"corda_config", "null", "CorDA changes the base weights"},
    {"ensure_weight_tying", "false", ""},
    {"eva_config", "null", ""},
    {"exclude_modules", "null", ""},
    {"fan_in_fan_out", "false", "weights must be stored as (out, in)", true},
    {"kasa_config", "null", "KaSA is not supported"},
    {"layer_replication", "null", "replicated layers are not supported"},
    {"layers_pattern", "null", ""},
    {"layers_to_transform", "null", ""},
    {"loftq_config", "{}", "LoftQ changes the base weights"},
    {"lora_bias", "false", "a bias on lora_B is not supported", true},
    {"lora_ga_config", "null", "LoRA-GA changes the base weights"},
    {"megatron_config", "null", "Megatron's layers are not supported"},
    {"megatron_core", "\"megatron.core\"", ""},
    {"modules_to_save", "null", ""},
    {"monteclora_config", "null", "MonteCLoRA is not supported"},
    {"qalora_group_size", "16", ""},
    {"target_parameters", "null", "adapters on bare parameters are not supported"},
    {"trainable_token_indices", "null", "trained embedding rows are not supported"},
    {"use_bdlora", "null", "BD-LoRA is not supported"},
    {"use_dora", "false", ""},
    {"use_qalora", "false", "QA-LoRA is not supported"},
    {"velora_config", "null", "VeLoRA is not supported"},
};

/// Initializations that leave the base weights alone, so that a trained adapter loads like any other.
constexpr std::array<std::string_view, 6> kInits{"true", "false", "gaussian", "eva", "orthogonal", "mica"};

bool is_init(std::string_view name) { return std::find(kInits.begin(), kInits.end(), name) != kInits.end(); }

/// Python's int where the number is one: PEFT's alpha is an int that people also set to a float.
Json number_json(double value) {
  const bool whole = std::floor(value) == value && std::fabs(value) < 9e15;
  return whole ? Json(static_cast<int64_t>(value)) : Json(value);
}

Json optional_text(const std::optional<std::string>& text) { return text ? Json(*text) : Json(nullptr); }

void read_targets(JsonFields& fields, AdapterConfig& config) {
  const Json* targets = fields.value("target_modules");
  if (targets == nullptr) return;
  if (targets->is_string()) config.target_pattern = targets->get<std::string>();
  else config.target_modules = *fields.texts("target_modules");
  if (targets->empty() || (config.target_pattern && config.target_pattern->empty())) {
    fields.fail("target_modules", "must name at least one module", *targets);
  }
}

template <class Value, class Accept>
std::map<std::string, Value> read_pattern(JsonFields& fields, std::string_view key, std::string_view rule, Accept accept) {
  std::map<std::string, Value> pattern;
  const Json* object = fields.value(key);
  if (object == nullptr) return pattern;
  if (!object->is_object()) fields.fail(key, "must be an object", *object);
  for (const auto& [module, value] : object->items()) {
    if (!accept(value)) fields.fail(message("{}.{}", key, printable(module)), rule, value);
    pattern.emplace(module, value.template get<Value>());
  }
  return pattern;
}

void check_not_mlx(const Json& json, std::string_view where) {
  QLORAPP_CHECK_FORMAT(
      json.contains("peft_type") || !(json.contains("lora_parameters") || json.contains("fine_tune_type")),
      "[{}] is an adapter of mlx-lm, whose names and layouts are not PEFT's. Fuse it with mlx_lm.fuse --model BASE "
      "--adapter-path ADAPTER --save-path OUTPUT, and use the fused model.",
      where);
}

/// A key that is off cannot change a result, whatever it is.
bool is_off(const Json& value) { return value.is_null() || value == Json(false); }

}  // namespace

void AdapterConfig::check() const {
  const auto is_alpha = [](double value) { return std::isfinite(value) && value > 0; };
  const auto is_rank = [](int64_t value) { return value >= 1 && value <= kMaxLoraRank; };
  QLORAPP_CHECK_VALUE(is_rank(r), "[LoRA] r must be from 1 to {}; got {}. Common ranks are 8 to 64.", kMaxLoraRank, r);
  QLORAPP_CHECK_VALUE(is_alpha(lora_alpha), "[LoRA] lora_alpha must be finite and above 0; got {}. Use 2 * r if in doubt.",
                      lora_alpha);
  QLORAPP_CHECK_VALUE(lora_dropout >= 0 && lora_dropout < 1, "[LoRA] lora_dropout must be in [0, 1); got {}. Use 0 if in doubt.",
                      lora_dropout);
  QLORAPP_CHECK_VALUE(target_modules.empty() || !target_pattern,
                      "[LoRA] target_modules must be a list or a pattern; got both. Keep one.");
  QLORAPP_CHECK_VALUE(is_init(init_lora_weights), "[LoRA] init_lora_weights must be one of {}; got {}. Use true.", joined(kInits),
                      printable(init_lora_weights));
  for (const auto& [module, rank] : rank_pattern) {
    QLORAPP_CHECK_VALUE(is_rank(rank), "[LoRA] a rank in rank_pattern must be from 1 to {}; {} has {}.", kMaxLoraRank,
                        printable(module), rank);
  }
  for (const auto& [module, alpha] : alpha_pattern) {
    QLORAPP_CHECK_VALUE(is_alpha(alpha), "[LoRA] an alpha in alpha_pattern must be finite and above 0; {} has {}.",
                        printable(module), alpha);
  }
}

AdapterConfig parse_adapter_config(std::string_view text, std::string_view where, AdapterUse use) {
  const Json json = parse_json(text, where, {.max_bytes = kMaxAdapterConfigBytes, .allow_big_integers = true});
  JsonFields fields(json, std::string(where));
  check_not_mlx(json, where);
  if (const std::string type = fields.required_text("peft_type"); type != "LORA") {
    fields.fail("peft_type", "must be LORA", Json(type), "Use a LoRA adapter.");
  }
  AdapterConfig config;
  config.r = fields.integer("r", 1, kMaxLoraRank).value_or(config.r);
  config.lora_alpha = fields.number("lora_alpha").value_or(config.lora_alpha);
  if (!(config.lora_alpha > 0)) fields.fail("lora_alpha", "must be above 0", Json(config.lora_alpha));
  config.lora_dropout = fields.number("lora_dropout").value_or(config.lora_dropout);
  if (!(config.lora_dropout >= 0 && config.lora_dropout < 1))
    fields.fail("lora_dropout", "must be in [0, 1)", Json(config.lora_dropout));
  config.use_rslora = fields.boolean("use_rslora").value_or(false);
  read_targets(fields, config);
  config.rank_pattern = read_pattern<int64_t>(
      fields, "rank_pattern", message("must be an integer from 1 to {}", kMaxLoraRank),
      [](const Json& v) { return v.is_number_integer() && v.get<int64_t>() >= 1 && v.get<int64_t>() <= kMaxLoraRank; });
  config.alpha_pattern = read_pattern<double>(fields, "alpha_pattern", "must be a finite number above 0", [](const Json& v) {
    return v.is_number() && std::isfinite(v.get<double>()) && v.get<double>() > 0;
  });
  if (const Json* init = fields.value("init_lora_weights")) {
    config.init_lora_weights = init->is_boolean()  ? (init->get<bool>() ? "true" : "false")
                               : init->is_string() ? init->get<std::string>()
                                                   : "";
    const bool spelled_bool = init->is_string() && (config.init_lora_weights == "true" || config.init_lora_weights == "false");
    if (!is_init(config.init_lora_weights) || spelled_bool) {
      fields.fail("init_lora_weights", "must be true, false, gaussian, eva, orthogonal or mica", *init,
                  "Others change the base weights: convert the adapter to plain LoRA with PEFT.");
    }
  }
  config.task_type = fields.text("task_type");
  config.base_model_name_or_path = fields.text("base_model_name_or_path");
  config.revision = fields.text("revision");
  config.inference_mode = fields.boolean("inference_mode").value_or(false);
  config.peft_version = fields.text("peft_version").value_or(config.peft_version);

  config.base_fingerprint = fields.text(kFingerprintKey);
  for (const OtherKey& other : kOtherKeys) {
    const Json* value = fields.value(other.key);
    const Json neutral = Json::parse(other.default_json);
    if (value == nullptr || *value == neutral) continue;
    const bool names_nothing = neutral.is_null() && value->is_array() && value->empty();  // as PEFT writes target_parameters
    if (!other.reason.empty() && !names_nothing && !(other.merges && use == AdapterUse::kMerge))
      fields.fail(other.key, message("must be {}: {}", other.default_json, other.reason), *value,
                  other.merges                ? "Merge it with qlorapp merge and use the merged model, or train without it."
                  : use == AdapterUse::kMerge ? kMergeInPython
                                              : "Train or convert the adapter without it.");
    config.preserved.emplace(other.key, dump_python_json(*value));
  }
  std::vector<std::string> unknown, off;
  for (const std::string& key : fields.remaining()) (is_off(json.at(key)) ? off : unknown).push_back(key);
  for (const std::string& key : unknown) {
    std::vector<std::string_view> known{"r",
                                        "lora_alpha",
                                        "lora_dropout",
                                        "use_rslora",
                                        "target_modules",
                                        "rank_pattern",
                                        "alpha_pattern",
                                        "init_lora_weights",
                                        "task_type",
                                        "base_model_name_or_path",
                                        "revision",
                                        "inference_mode",
                                        "peft_type",
                                        "peft_version"};
    for (const OtherKey& other : kOtherKeys) known.push_back(other.key);
    const std::string meant = did_you_mean(key, known);
    // One of PEFT's to come would have another name than those of today; a value under a misspelled one would be ignored.
    QLORAPP_CHECK_FORMAT(meant.empty(), "[{}] {} is not a key of an adapter.{} Correct it, or remove it.", where, printable(key),
                         meant);
  }
  if (!unknown.empty()) log_warning_once(message("[{}] unknown keys have no effect and are kept: {}.", where, listed(unknown)));
  std::sort(off.begin(), off.end());
  if (!off.empty()) log_warning_once(message("[{}] unknown keys that are null or false are ignored: {}.", where, listed(off)));
  unknown.insert(unknown.end(), off.begin(), off.end());
  for (const std::string& key : unknown) config.preserved.emplace(key, dump_python_json(json.at(key)));
  return config;
}

AdapterConfig parse_adapter_config(std::string_view text, std::string_view where) {
  return parse_adapter_config(text, where, AdapterUse::kCompute);
}

AdapterConfig load_adapter_config(const std::string& folder) { return load_adapter_config(folder, AdapterUse::kCompute); }

AdapterConfig load_adapter_config(const std::string& folder, AdapterUse use) {
  const files::FileReader file = files::FileReader::open_inside(folder, kFileName);
  return parse_adapter_config(file.read_all(kMaxAdapterConfigBytes), file.path(), use);
}

std::string adapter_config_json(const AdapterConfig& config) {
  config.check();
  Json json = Json::object();
  for (const OtherKey& other : kOtherKeys) json[std::string(other.key)] = Json::parse(other.default_json);
  for (const auto& [key, value] : config.preserved)
    json[key] = parse_json(value, "AdapterConfig.preserved", {.allow_nonfinite = true, .allow_big_integers = true});
  if (config.base_fingerprint) json[kFingerprintKey] = *config.base_fingerprint;
  json["alpha_pattern"] = Json::object();
  for (const auto& [module, alpha] : config.alpha_pattern) json["alpha_pattern"][module] = number_json(alpha);
  json["base_model_name_or_path"] = optional_text(config.base_model_name_or_path);
  json["inference_mode"] = config.inference_mode;
  const bool spelled_bool = config.init_lora_weights == "true" || config.init_lora_weights == "false";
  json["init_lora_weights"] = spelled_bool ? Json(config.init_lora_weights == "true") : Json(config.init_lora_weights);
  json["lora_alpha"] = number_json(config.lora_alpha);
  json["lora_dropout"] = config.lora_dropout;
  json["peft_type"] = "LORA";
  json["peft_version"] = config.peft_version;
  json["r"] = config.r;
  json["rank_pattern"] = Json::object();
  for (const auto& [module, rank] : config.rank_pattern) json["rank_pattern"][module] = rank;
  json["revision"] = optional_text(config.revision);
  std::vector<std::string> targets = config.target_modules;
  std::sort(targets.begin(), targets.end());
  json["target_modules"] = config.target_pattern ? Json(*config.target_pattern) : targets.empty() ? Json(nullptr) : Json(targets);
  json["task_type"] = optional_text(config.task_type);
  json["use_rslora"] = config.use_rslora;
  return dump_python_json(json, kConfigStyle);
}

void save_adapter_config(const AdapterConfig& config, const std::string& folder) {
  files::write_file_atomically(folder + "/" + kFileName, adapter_config_json(config));
}

}  // namespace qlorapp::format
