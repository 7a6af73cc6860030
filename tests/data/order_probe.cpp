// SPDX-License-Identifier: Apache-2.0
// Prints the order of epochs, for tests/python to compare with transformers' Trainer. One JSON request on stdin:
// {"rows", "epochs", "strategy", "seed", "group"?, "lengths"?} → [[rows of an epoch], …].
#include <iostream>
#include <nlohmann/json.hpp>

#include "data/sampler.hpp"

int main() {
  try {
    const auto request = nlohmann::json::parse(std::cin);
    qlorapp::SamplerOptions options;
    options.strategy = qlorapp::sampling_strategy(request["strategy"].get<std::string>());
    options.seed = request["seed"].get<int64_t>();
    options.group_size = request.value("group", options.group_size);
    options.lengths = request.value("lengths", options.lengths);
    nlohmann::json orders = nlohmann::json::array();
    for (int64_t epoch = 0; epoch < request["epochs"].get<int64_t>(); ++epoch) {
      orders.push_back(qlorapp::epoch_order(request["rows"].get<int64_t>(), epoch, options));
    }
    std::cout << orders.dump() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 2;
  }
}
