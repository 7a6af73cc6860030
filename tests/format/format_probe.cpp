// SPDX-License-Identifier: Apache-2.0
// Drives the format layer from the Python tests, which hold its output against safetensors, transformers, bitsandbytes and
// PEFT.
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "format/quant_state.hpp"
#include "format/safetensors.hpp"
#include "format/tensor_files.hpp"
#include "format/yaml.hpp"
#include "json/python_json.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/format/quantization_config.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Reads every tensor and writes it again.
void safetensors_copy(const std::string& in, const std::string& out) {
  const SafetensorsFile file(in);
  std::vector<TensorSpec> specs;
  for (const TensorEntry& tensor : file.tensors()) specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  std::vector<std::byte> bytes;
  write_safetensors(out, specs, file.metadata(), [&](const TensorEntry& tensor) {
    bytes.resize(static_cast<size_t>(tensor.nbytes));
    file.read(tensor.name, 0, bytes);
    return std::span<const std::byte>(bytes);
  });
}

/// One line for each path on standard input: "ok" or the refusal.
void safetensors_verdicts() {
  for (std::string path; std::getline(std::cin, path);) {
    try {
      const SafetensorsFile file(path);
      std::cout << "ok\n";
    } catch (const FormatError& error) { std::cout << error.what() << '\n'; }
  }
}

/// Each line of `in` is JSON; it is written in each of the styles, one after the other.
void python_json(const std::string& in) {
  std::istringstream lines(content(in));
  for (std::string line; std::getline(lines, line);) {
    const Json value = parse_json(line, in, {.allow_nonfinite = true, .allow_big_integers = true});
    for (const int indent : {-1, 2}) {
      for (const bool sorted : {false, true}) {
        for (const bool ascii : {true, false}) {
          std::cout << dump_python_json(value, {.indent = indent, .sort_keys = sorted, .ensure_ascii = ascii}) << '\0';
        }
      }
    }
  }
}

/// Scalars as text.
Json structure(const YamlNode& node) {
  if (node.is_scalar()) return node.text;
  Json json = node.kind == YamlNode::Kind::kList ? Json::array() : Json::object();
  for (size_t i = 0; i < node.items.size(); ++i) {
    if (json.is_array()) json.push_back(structure(node.items[i]));
    else json.get_ref<Json::object_t&>().emplace_back(node.keys[i].text, structure(node.items[i]));
  }
  return json;
}

/// `in` holds a list of texts. For each [structure, values], or the refusal of either in its place.
void yaml(const std::string& in) {
  Json results = Json::array();
  for (const Json& text : parse_json(content(in), in)) {
    Json result = Json::array();
    try {
      const YamlNode node = parse_yaml(text.get<std::string>(), "f.yaml");
      result.push_back(structure(node));
      result.push_back(untyped_json(node, "f.yaml"));
    } catch (const FormatError& error) { result.push_back({{"refused", error.what()}}); }
    results.push_back(result);
  }
  std::cout << dump_python_json(results) << '\n';
}

/// Of the linear layers, or of all others.
Json shapes(const ModelConfig& config, bool linear) {
  Json json = Json::object();
  for (const Parameter& parameter : parameters(config)) {
    if ((parameter.role == Role::kLinear) == linear) json[linear ? parameter.module : parameter.name()] = parameter.shape;
  }
  return json;
}

/// @param length  of the longest row, for the rotary frequencies.
void model_config(const std::string& folder, int64_t length) {
  const ModelConfig config = load_model_config(folder);
  const RopeSettings& rope = config.ropes.front();
  Json json = {{"hidden_size", config.hidden_size},
               {"intermediate_size", config.intermediate_size},
               {"num_hidden_layers", config.num_hidden_layers},
               {"num_attention_heads", config.num_attention_heads},
               {"num_key_value_heads", config.num_key_value_heads},
               {"head_dim", config.head_dim},
               {"vocab_size", config.vocab_size},
               {"max_position_embeddings", config.max_position_embeddings},
               {"rms_norm_eps", config.rms_norm_eps},
               {"tie_word_embeddings", config.tie_word_embeddings},
               {"eos_token_id", config.eos_token_ids},
               {"rope_type", to_string(rope.type)},
               {"rope_theta", rope.theta},
               {"linear_layers", shapes(config, true)},
               {"dense_parameters", shapes(config, false)},
               {"parameter_count", parameter_count(config)},
               {"attention_factor", rope.attention_factor},
               {"inverse_frequencies", rope_inverse_frequencies(rope, length)},
               {"fields", Json::object()}};
  for (const auto& [key, value] : computed_fields(config)) json["fields"][key] = Json::parse(value);
  json["dtype"] = config.dtype ? Json(torch_name(*config.dtype)) : Json(nullptr);
  json["quantization"] = config.quantization ? quantization_config_json(*config.quantization) : Json(nullptr);
  std::cout << dump_python_json(json) << '\n';
}

/// For each four-bit weight of a folder: its quant_state written again, and the tensors that a writer would make.
void quant_state(const std::string& folder) {
  const TensorFiles files(folder);
  Json json = Json::object();
  for (const TensorLocation& location : files.tensors()) {
    const std::string& name = location.tensor->name;
    if (!name.ends_with(".weight") || !is_quantized(files, name)) continue;
    const QuantizedWeight weight = find_quantized_weight(files, name);
    Json tensors = Json::object();
    for (const TensorSpec& spec : quantized_tensor_specs(name, weight.state))
      tensors[spec.name] = {dtype_name(spec.dtype), spec.shape};
    json[name] = {{"json", quant_state_json(weight.state)}, {"tensors", tensors}};
  }
  std::cout << dump_python_json(json) << '\n';
}

int run(const std::vector<std::string>& args) {
  const auto is = [&](const char* command, size_t count) { return args.size() == count + 1 && args[0] == command; };
  if (is("safetensors-copy", 2)) safetensors_copy(args[1], args[2]);
  else if (is("safetensors-verdicts", 0)) safetensors_verdicts();
  else if (is("python-json", 1)) python_json(args[1]);
  else if (is("yaml", 1)) yaml(args[1]);
  else if (is("model-config", 2)) model_config(args[1], std::stoll(args[2]));
  else if (is("quant-state", 1)) quant_state(args[1]);
  else if (is("quantization-config", 2))
    std::cout << with_quantization_config(content(args[1]), args[1],
                                          parse_quantization_config(parse_json(content(args[2]), args[2]), args[2]));
  else if (is("adapter-config", 2)) save_adapter_config(load_adapter_config(args[1]), args[2]);
  else return 1;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}
