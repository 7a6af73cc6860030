// SPDX-License-Identifier: Apache-2.0
/// A store that all ranks see, as a place to meet: who is there, who failed, and what each rank has to say.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace qlorapp {

class Communicator;

class MeetingPlace {
 public:
  MeetingPlace(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::chrono::milliseconds timeout);
  /// Where only `members` of the ranks of `whole` meet. A failure is everybody's.
  MeetingPlace(const MeetingPlace& whole, std::vector<int64_t> members);

  /// Leaves `mine` for the others and reads what each of them left, in the order of ranks.
  /// @throws IoError naming the ranks that did not come in time, or why one has ended; from then on always, as the ranks are out of step.
  [[nodiscard]] std::vector<std::vector<uint8_t>> exchange(const std::vector<uint8_t>& mine);

  /// Every other rank that waits, or will wait, ends with this.
  void report_failure(const std::string& why);
  /// Returns the reported failure, or "" if no rank reports one within `patience`.
  [[nodiscard]] std::string failure(std::chrono::milliseconds patience) const noexcept;

  /// This rank makes no more exchanges. @param last  it keeps the store: waits until all have left, or one has failed.
  void leave(bool last) noexcept;

  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  [[nodiscard]] const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  /// The number in the whole run of each rank that meets here.
  [[nodiscard]] const std::vector<int64_t>& numbers() const { return numbers_; }
  /// This rank's number in the whole run.
  [[nodiscard]] int64_t number() const { return numbers_[static_cast<size_t>(rank_)]; }
  /// The start of each key of this place.
  [[nodiscard]] const std::string& prefix() const { return prefix_; }

  static constexpr const char* kFailure = "failure";

 private:
  [[nodiscard]] std::string key(int64_t round, int64_t rank, int64_t part) const;
  [[nodiscard]] std::vector<uint8_t> read(int64_t round, int64_t rank, std::chrono::steady_clock::time_point end);
  void wait_for(const std::string& key, int64_t round, std::chrono::steady_clock::time_point end);
  [[noreturn]] void give_up(int64_t round);
  void refuse_after_failure() const;
  /// What the store answers. @throws IoError if it is gone: its keeper has ended.
  template <class Call>
  auto ask(const Call& call);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::vector<int64_t> numbers_;
  int64_t rank_, size_, round_ = 0;
  bool is_gone_ = false;      ///< The store.
  std::string failed_;        ///< Of this rank or another: why.
  int64_t parts_before_ = 0;  ///< Of what this rank left in the round before.
  std::chrono::milliseconds timeout_;
};

/// Ranks that exchange all they have at `place`. @param keeps_store  as communicator_over().
[[nodiscard]] std::shared_ptr<Communicator> communicator_at(MeetingPlace place, int64_t rank, bool keeps_store);

}  // namespace qlorapp
