// SPDX-License-Identifier: Apache-2.0
/// A file that appears whole or not at all, whatever happens while it is written.
///
/// The bytes go to a temporary file in the same folder (O_EXCL, O_NOFOLLOW; mode 0666 less the umask, or that of the file it
/// will replace); commit() flushes it to the disk, renames it over the target and flushes the folder, in this order. Until
/// the rename the target is unchanged; without commit() the temporary file is removed. The next file that is written into the folder
/// removes the temporary files of killed processes. In a folder that is flushed as a whole before it is used (folder.hpp: is_staging) it
/// flushes nothing.
///
/// Source: rename(2) is atomic within a file system; Pillai et al. 2014 (OSDI), "All file systems are not created equal",
/// on why both flushes are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace qlorapp::files {

class AtomicFile {
 public:
  /// @throws IoError with path and errno, if the temporary file cannot be made.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Claims room for `bytes` in all, so that a full disk is noticed before the first of them is written. Where the file
  /// system cannot, does nothing. @throws IoError (ENOSPC, EDQUOT, EFBIG …).
  void reserve(int64_t bytes);

  /// Appends. Interrupted and short writes are continued. @throws IoError.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// Makes the file appear. Call once. @throws IoError; then the target is unchanged, unless flushing the folder was all that
  /// failed: the new file is in place and may be lost only if the machine loses power.
  void commit();

 private:
  [[noreturn]] void fail(std::string_view what, int error) const;

  std::string path_, folder_, temporary_;
  int descriptor_ = -1;
};

/// Removes temporary files of processes that are gone from a folder.
void remove_left_files(const std::string& folder);

/// Writes a small file at once. @throws IoError.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace qlorapp::files
