// SPDX-License-Identifier: Apache-2.0
/// Counts the memory of meta tensors: tensors of the device "meta" have shapes and no bytes, so code that runs on them
/// allocates what it would allocate on a GPU, at once and for nothing. What a computation needs is then found by running it,
/// not by a second description of it that would have to be kept in step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "qlorapp/core/units.hpp"

namespace qlorapp {

/// While it lives, counts the meta tensors that this thread makes. Accounts of a thread nest: the innermost counts.
class MemoryAccount {
 public:
  /// Of torch's caching allocator on a GPU: every request is rounded up to this. (Large requests may be given up to 1 MiB more
  /// where a free block is not worth splitting; that depends on the past and is not counted.)
  static constexpr int64_t kRounding = 512;

  MemoryAccount();
  ~MemoryAccount();
  MemoryAccount(const MemoryAccount&) = delete;
  MemoryAccount& operator=(const MemoryAccount&) = delete;

  [[nodiscard]] Bytes now() const;   ///< Of the tensors that are alive.
  [[nodiscard]] Bytes peak() const;  ///< The most that were alive at a time.
  /// The most while each phase lasted; a phase that came again has the larger of its peaks.
  [[nodiscard]] const std::map<std::string, Bytes, std::less<>>& peaks() const;

  /// From here on the current account's bytes belong to this phase. Does nothing where this thread has no account.
  static void phase(std::string_view name);

  struct Book;

 private:
  std::shared_ptr<Book> book_, before_;
};

}  // namespace qlorapp
