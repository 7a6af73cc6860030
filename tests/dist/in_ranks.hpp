// SPDX-License-Identifier: Apache-2.0
/// Ranks as threads of one process that share a store.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "qlorapp/dist/communicator.hpp"

namespace qlorapp {

/// Runs `work` on each of `size` ranks. @returns what each has thrown; null: nothing.
inline std::vector<std::exception_ptr> in_ranks(int64_t size, const std::function<void(Communicator&)>& work,
                                                std::chrono::milliseconds timeout = std::chrono::seconds{20}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto ranks = communicator_over(store, rank, size, timeout);
        work(*ranks);
      } catch (...) { thrown[static_cast<size_t>(rank)] = std::current_exception(); }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

/// The same; rethrows what the first rank that failed has thrown.
inline void on_ranks(int64_t size, const std::function<void(Communicator&)>& work) {
  for (const std::exception_ptr& error : in_ranks(size, work)) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace qlorapp
