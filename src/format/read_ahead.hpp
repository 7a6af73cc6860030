// SPDX-License-Identifier: Apache-2.0
/// Tensors read from their files by several threads, ahead of the one who uses them.
///
///     files  ──►  threads  ──►  a ring of buffers  ──►  next()  ──►  the caller  ──►  release()
///
/// The tensors are cut into pieces and the pieces packed into batches of at most one buffer, in the order in which the tensors
/// are given. Threads take batches in that order, each with a free buffer, and the caller gets them in that order, so reading
/// runs ahead over tensors and files as far as there are buffers, and stands still when the caller does.
///
/// One thread copies 4 to 8 GB/s out of the page cache; a GPU takes 50. Reading is pread (docs/adr/0006): memory is the ring's.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "format/tensor_files.hpp"

namespace qlorapp::format {

/// Reads into.size() bytes of a tensor, from its byte `offset` on. Thread-safe.
/// @throws FormatError, IoError as FileReader::read_at, naming the tensor, too.
void read_piece(const TensorLocation& from, int64_t offset, std::span<std::byte> into);

/// @throws FormatError as FileReader::check_unchanged, for each of their files.
void check_unchanged(std::span<const TensorLocation> tensors);

class ReadAhead {
 public:
  /// Where in its buffer a piece begins: a multiple of this, so that vector instructions like it.
  static constexpr size_t kAlignment = 256;
  /// A buffer's size is a multiple of this, so that a piece never ends inside an element or a quantization block (4096 floats).
  static constexpr size_t kBufferStep = size_t{16} << 10;

  struct Piece {
    size_t tensor = 0;   ///< Index into the tensors.
    int64_t offset = 0;  ///< Of its first byte in the tensor; a multiple of the buffers' size.
    int64_t nbytes = 0;
    size_t at = 0;  ///< Where in the buffer it begins.
  };
  struct Batch {
    size_t buffer = 0;  ///< Index into the ring; the caller's until it gives it back.
    std::span<const Piece> pieces;
  };

  /// Starts reading.
  /// @param tensors  in the order in which they are wanted; best that of their bytes in the files. Empty ones make no piece.
  /// @param ring      equally large, at least one, alive as long as this.
  /// @param threads   at least one.
  /// @throws ValueError for a size that is no multiple of kBufferStep, an empty ring, no threads.
  ReadAhead(std::vector<TensorLocation> tensors, std::vector<std::span<std::byte>> ring, int threads);
  /// Stops and joins, after the reads in progress.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// The next batch, or nothing after the last. Waits for it. One thread of the caller's at a time.
  /// @throws FormatError, IoError naming the file and the tensor if reading it failed, and if one of the files was changed
  ///         between its opening and the last batch.
  [[nodiscard]] std::optional<Batch> next();
  /// Whether next() would return, or throw, at once.
  [[nodiscard]] bool ready() const;
  /// Gives a buffer back. All of them may be out at a time; then nothing is read.
  void release(size_t buffer);

  /// The number of buffers of this size that can be of use.
  [[nodiscard]] static size_t useful_buffers(std::span<const TensorLocation> tensors, size_t buffer_bytes);

 private:
  struct State {
    size_t first_piece = 0;
    size_t buffer = 0;
    bool done = false;
    std::exception_ptr error;
  };
  void work();
  void read(std::span<const Piece> pieces, std::span<std::byte> buffer) const;
  [[nodiscard]] std::span<const Piece> pieces_of(size_t batch) const;

  std::vector<TensorLocation> tensors_;
  std::vector<std::span<std::byte>> ring_;
  std::vector<Piece> pieces_;

  mutable std::mutex mutex_;  ///< Of what follows.
  std::condition_variable may_read_, may_take_;
  std::vector<State> batches_;
  std::vector<size_t> free_;
  size_t begun_ = 0, taken_ = 0;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace qlorapp::format
