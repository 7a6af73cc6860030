// SPDX-License-Identifier: Apache-2.0
// Prints the rows that the Sampler hands out, for tests/python to compare with transformers' Trainer. One JSON request on
// stdin:
// {"rows", "epochs", "batch", "strategy", "seed", "group"?, "lengths"?, "from"?: [epoch, row]} → [[rows of a batch], …].
#include <iostream>
#include <nlohmann/json.hpp>

#include "qlorapp/data/sampler.hpp"

int main() {
  try {
    const auto request = nlohmann::json::parse(std::cin);
    qlorapp::SamplerOptions options;
    options.strategy = qlorapp::sampling_strategy(request["strategy"].get<std::string>());
    options.seed = request["seed"].get<int64_t>();
    options.group_size = request.value("group", options.group_size);
    options.lengths = request.value("lengths", options.lengths);
    qlorapp::Sampler sampler(request["rows"].get<int64_t>(), options);
    if (request.contains("from")) sampler.seek({request["from"][0].get<int64_t>(), request["from"][1].get<int64_t>()});
    nlohmann::json batches = nlohmann::json::array();
    const auto epochs = request["epochs"].get<int64_t>();
    while (sampler.position().epoch < epochs - 1 || !sampler.at_end_of_epoch()) {
      batches.push_back(sampler.next(request["batch"].get<int64_t>()));
    }
    std::cout << batches.dump() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 2;
  }
}
