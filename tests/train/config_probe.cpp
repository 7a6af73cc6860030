// SPDX-License-Identifier: Apache-2.0
// Answers one JSON request a line, for tests/python/test_lora_config.py and its neighbors:
//   {"defaults": true}                        both configs as they begin
//   {"lora": {…}, "names": ["…"]}             which modules match, with rank, alpha and scaling; or {"error": "…"}
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include "format/config_json.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/train/training_arguments.hpp"

int main() {
  using qlorapp::format::Json;
  for (std::string line; std::getline(std::cin, line);) {
    const Json request = qlorapp::format::parse_json(line, "request");
    Json answer = Json::object();
    try {
      if (request.contains("defaults")) {
        answer["training_arguments"] = qlorapp::format::to_json(qlorapp::TrainingArguments{});
        answer["lora_config"] = qlorapp::format::to_json(qlorapp::LoraConfig{});
      } else {
        qlorapp::LoraConfig config;
        qlorapp::format::from_json(request.at("lora"), config, "lora");
        config.validate();
        answer["modules"] = Json::array();
        for (const Json& entry : request.at("names")) {
          const auto name = entry.get<std::string>();
          answer["modules"].push_back({{"matches", config.matches(name)},
                                       {"rank", config.rank_of(name)},
                                       {"alpha", config.alpha_of(name)},
                                       {"scaling", config.scaling_of(name)}});
        }
      }
    } catch (const std::exception& error) { answer = {{"error", error.what()}}; }
    std::cout << answer.dump() << '\n';
  }
  return 0;
}
