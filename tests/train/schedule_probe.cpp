// SPDX-License-Identifier: Apache-2.0
// Reads "<type> <W> <T> <base rate> <steps>" or "<count> …" lines and prints rates as hexadecimal floats, one line each.
// tests/python/test_schedule.py compares them with transformers.
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "qlorapp/train/schedule.hpp"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "training_steps") {
      int64_t micro_batches = 0, accumulation = 0, max_steps = 0;
      double epochs = 0;
      words >> micro_batches >> accumulation >> epochs >> max_steps;
      std::cout << qlorapp::count_training_steps(micro_batches, accumulation, epochs, max_steps) << '\n';
    } else if (verb == "warmup_steps" || verb == "interval_steps") {
      double steps = 0, ratio = 0;
      int64_t total = 0;
      words >> steps >> ratio >> total;
      std::cout << (verb == "warmup_steps" ? qlorapp::count_warmup_steps(steps, ratio, total)
                                           : qlorapp::count_interval_steps(steps, total))
                << '\n';
    } else {
      qlorapp::Schedule schedule{.type = qlorapp::schedule_type(verb)};
      double base = 0;
      int64_t steps = 0;
      words >> schedule.warmup_steps >> schedule.training_steps >> base >> steps;
      for (int64_t step = 0; step < steps; ++step) std::printf("%a ", schedule.learning_rate(base, step));
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}
