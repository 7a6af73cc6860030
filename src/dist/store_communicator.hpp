// SPDX-License-Identifier: Apache-2.0
/// A store that all ranks see, as a place to meet: who is there, who failed, and what each rank has to say.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace qlorapp {

class MeetingPlace {
 public:
  MeetingPlace(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::chrono::milliseconds timeout);

  /// Leaves `mine` for the others and reads what each of them left, in the order of ranks.
  /// @throws IoError naming the ranks that did not come in time, or why one has ended.
  [[nodiscard]] std::vector<std::vector<uint8_t>> exchange(const std::vector<uint8_t>& mine);

  /// Every other rank that waits, or will wait, ends with this.
  void report_failure(const std::string& why);

  /// This rank makes no more exchanges. @param last  it keeps the store: waits until all have left, or one has failed.
  void leave(bool last) noexcept;

  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  [[nodiscard]] std::string key(int64_t round, int64_t rank, int64_t part) const;
  [[nodiscard]] std::vector<uint8_t> read(int64_t round, int64_t rank, std::chrono::steady_clock::time_point end);
  void wait_for(const std::string& key, int64_t round, std::chrono::steady_clock::time_point end);
  [[noreturn]] void give_up(int64_t round);
  /// What the store answers. @throws IoError if it is gone: its keeper has ended.
  template <class Call>
  auto ask(const Call& call);

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_, size_, round_ = 0;
  bool is_gone_ = false;      ///< The store.
  int64_t parts_before_ = 0;  ///< Of what this rank left in the round before.
  std::chrono::milliseconds timeout_;
};

}  // namespace qlorapp
