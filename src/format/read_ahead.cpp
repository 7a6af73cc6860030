// SPDX-License-Identifier: Apache-2.0
#include "format/read_ahead.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/check.hpp"
#include "core/printable.hpp"

namespace qlorapp::format {
namespace {

constexpr size_t aligned(size_t at) { return (at + ReadAhead::kAlignment - 1) / ReadAhead::kAlignment * ReadAhead::kAlignment; }

/// Calls piece(tensor, offset, bytes, place) for each and batch() before the first of each batch.
template <class OnBatch, class OnPiece>
void pack(std::span<const TensorLocation> tensors, size_t buffer_bytes, OnBatch&& on_batch, OnPiece&& on_piece) {
  size_t used = buffer_bytes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t total = tensors[i].tensor->nbytes;
    for (int64_t offset = 0; offset < total; offset += static_cast<int64_t>(buffer_bytes)) {
      const size_t bytes = std::min(static_cast<size_t>(total - offset), buffer_bytes);
      if (aligned(used) + bytes > buffer_bytes) {
        on_batch();
        used = 0;
      }
      on_piece(i, offset, bytes, aligned(used));
      used = aligned(used) + bytes;
    }
  }
}

}  // namespace

void read_piece(const TensorLocation& from, int64_t offset, std::span<std::byte> into) {
  const auto in_tensor = [&](const char* what) { return message("{} The tensor is {}.", what, printable(from.tensor->name)); };
  try {
    from.file->read(*from.tensor, offset, into);
  } catch (const FormatError& error) { throw FormatError(in_tensor(error.what())); } catch (const IoError& error) {
    throw IoError(in_tensor(error.what()), error.error_number());
  }
}

void check_unchanged(std::span<const TensorLocation> tensors) {
  const TensorSource* checked = nullptr;
  for (const TensorLocation& tensor : tensors) {
    if (tensor.file != std::exchange(checked, tensor.file)) checked->check_unchanged();
  }
}

ReadAhead::ReadAhead(std::vector<TensorLocation> tensors, std::vector<std::span<std::byte>> ring, int threads)
    : tensors_(std::move(tensors)), ring_(std::move(ring)) {
  QLORAPP_CHECK_VALUE(!ring_.empty() && threads > 0, "[read_ahead] at least one buffer and one thread are required; got {} and {}.",
                      ring_.size(), threads);
  const size_t bytes = ring_.front().size();
  for (const std::span<std::byte> buffer : ring_) {
    QLORAPP_CHECK_VALUE(buffer.size() == bytes && bytes > 0 && bytes % kBufferStep == 0,
                        "[read_ahead] buffers must have one size, a multiple of {} bytes; got {} bytes.", kBufferStep,
                        buffer.size());
  }
  pack(
      tensors_, bytes, [&] { batches_.push_back({.first_piece = pieces_.size(), .buffer = 0, .done = false, .error = {}}); },
      [&](size_t tensor, int64_t offset, size_t size, size_t at) {
        pieces_.push_back({tensor, offset, static_cast<int64_t>(size), at});
      });
  for (size_t i = ring_.size(); i-- > 0;) free_.push_back(i);
  const size_t wanted = std::min({static_cast<size_t>(threads), ring_.size(), batches_.size()});
  try {
    for (size_t i = 0; i < wanted; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {  // a limit on processes: fewer do it too
    if (threads_.empty())
      throw IoError("[load] cannot start a thread for reading. Raise the limit on processes.", error.code().value());
  }
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  may_read_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::span<const ReadAhead::Piece> ReadAhead::pieces_of(size_t batch) const {
  const size_t first = batches_[batch].first_piece;
  const size_t end = batch + 1 < batches_.size() ? batches_[batch + 1].first_piece : pieces_.size();
  return std::span(pieces_).subspan(first, end - first);
}

void ReadAhead::read(std::span<const Piece> pieces, std::span<std::byte> buffer) const {
  for (const Piece& piece : pieces) {
    read_piece(tensors_[piece.tensor], piece.offset, buffer.subspan(piece.at, static_cast<size_t>(piece.nbytes)));
  }
}

void ReadAhead::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    may_read_.wait(lock, [&] { return stopping_ || begun_ == batches_.size() || !free_.empty(); });
    if (stopping_ || begun_ == batches_.size()) return;
    const size_t batch = begun_++, buffer = free_.back();
    free_.pop_back();
    const std::span<const Piece> pieces = pieces_of(batch);
    lock.unlock();
    std::exception_ptr error;
    try {
      read(pieces, ring_[buffer]);
    } catch (...) { error = std::current_exception(); }
    lock.lock();
    State& state = batches_[batch];
    state.buffer = buffer;
    state.done = true;
    state.error = error;
    if (error) {  // those before it are being read, those after it will not be asked for
      stopping_ = true;
      may_read_.notify_all();
    }
    if (begun_ == batches_.size()) may_read_.notify_all();
    may_take_.notify_one();
  }
}

std::optional<ReadAhead::Batch> ReadAhead::next() {
  std::unique_lock lock(mutex_);
  if (taken_ == batches_.size()) {
    check_unchanged(tensors_);
    return std::nullopt;
  }
  may_take_.wait(lock, [&] { return batches_[taken_].done; });
  const State& state = batches_[taken_];
  if (state.error) std::rethrow_exception(state.error);
  return Batch{state.buffer, pieces_of(taken_++)};
}

bool ReadAhead::ready() const {
  const std::lock_guard lock(mutex_);
  return taken_ == batches_.size() || batches_[taken_].done;
}

void ReadAhead::release(size_t buffer) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }
  may_read_.notify_one();
}

size_t ReadAhead::useful_buffers(std::span<const TensorLocation> tensors, size_t buffer_bytes) {
  size_t batches = 0;
  pack(
      tensors, buffer_bytes, [&] { ++batches; }, [](auto...) {});
  return batches;
}

}  // namespace qlorapp::format
