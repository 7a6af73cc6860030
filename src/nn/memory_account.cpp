// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/memory_account.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace qlorapp {

/// Tensors may be freed after their account, and by another thread.
struct MemoryAccount::Book {
  mutable std::mutex mutex;
  int64_t now = 0, peak = 0;
  std::map<std::string, Bytes, std::less<>> peaks;
  std::map<std::string, Bytes, std::less<>>::iterator current = peaks.end();

  void add(int64_t bytes) {
    const std::lock_guard lock(mutex);
    now += bytes;
    note();
  }
  void begin(std::string_view name) {
    const std::lock_guard lock(mutex);
    current = peaks.try_emplace(std::string(name)).first;
    note();
  }

 private:
  void note() {
    peak = std::max(peak, now);
    if (current != peaks.end()) current->second = std::max(current->second, Bytes{now});
  }
};

namespace {

thread_local std::shared_ptr<MemoryAccount::Book> t_book;

struct Entry {
  std::shared_ptr<MemoryAccount::Book> book;
  int64_t bytes;
};

void release(void* entry) {
  const std::unique_ptr<Entry> own(static_cast<Entry*>(entry));
  own->book->add(-own->bytes);
}

/// torch's allocator of meta memory, which hands out null, and an entry in the book of the thread that asks.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* plain) : plain_(plain) {}
  c10::DataPtr allocate(size_t size) override {
    if (!t_book || size == 0) return plain_->allocate(size);
    const int64_t bytes =
        (static_cast<int64_t>(size) + MemoryAccount::kRounding - 1) / MemoryAccount::kRounding * MemoryAccount::kRounding;
    t_book->add(bytes);
    return {nullptr, new Entry{t_book, bytes}, &release, c10::Device(c10::DeviceType::Meta)};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return plain_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t count) const override { plain_->copy_data(to, from, count); }

 private:
  c10::Allocator* plain_;
};

/// Stays for the life of the process: tensors of it may.
void install() {
  static const bool once = [] {
    static CountingAllocator counting(c10::GetAllocator(c10::DeviceType::Meta));
    c10::SetAllocator(c10::DeviceType::Meta, &counting, /*priority=*/1);
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

MemoryAccount::MemoryAccount() : book_(std::make_shared<Book>()) {
  install();
  before_ = std::exchange(t_book, book_);
}

MemoryAccount::~MemoryAccount() { t_book = before_; }

Bytes MemoryAccount::now() const {
  const std::lock_guard lock(book_->mutex);
  return {book_->now};
}

Bytes MemoryAccount::peak() const {
  const std::lock_guard lock(book_->mutex);
  return {book_->peak};
}

const std::map<std::string, Bytes, std::less<>>& MemoryAccount::peaks() const { return book_->peaks; }

void MemoryAccount::phase(std::string_view name) {
  if (t_book) t_book->begin(name);
}

}  // namespace qlorapp
