// SPDX-License-Identifier: Apache-2.0
/// MANIFEST.json lists a checkpoint folder's files and is written last. A folder whose files are those of its manifest is complete; one
/// without a manifest is not.
///
///     {"schema": 1, "kind": "checkpoint", "run_id": "<32 hex digits>", "step": 50, "parent": "checkpoint-40",
///      "files": {"optimizer.safetensors": {"size": 5, "sha256": "<64 hex digits>", "crc32c": ["1c291ca3"]}, …},
///      "sha256": "<of this text without this key>"}
///
/// The manifest of another folder (adapter, four-bit or merged model) has kind "output" and no run_id, step and parent. A user may change and
/// add files there.
///
/// CRC-32C is of each 4 MiB, so that a message can say where a file is damaged. The last key finds a change of the manifest itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::files {

inline constexpr std::string_view kManifestName = "MANIFEST.json";
inline constexpr std::string_view kCheckpointKind = "checkpoint", kOutputKind = "output";
inline constexpr int64_t kManifestChunk = int64_t{4} << 20;

struct ManifestFile {
  std::string name;  ///< Relative to the folder, parts divided by '/'.
  int64_t size = 0;
  std::string sha256;
  std::vector<uint32_t> crc32c;  ///< Of each chunk.
};

struct Manifest {
  std::string kind;    ///< kCheckpointKind or kOutputKind.
  std::string run_id;  ///< Of the run that wrote a checkpoint: 32 hexadecimal digits.
  std::string parent;  ///< Name of the checkpoint before it in that run; empty: it is the first.
  int64_t step = 0;
  std::vector<ManifestFile> files;  ///< In order of names.
};

/// Reads every file of a folder and of those in it, and flushes each to the disk.
/// @throws IoError; FormatError for anything that is not a regular file or folder.
[[nodiscard]] std::vector<ManifestFile> flush_and_describe(const std::string& folder);

[[nodiscard]] std::string manifest_text(const Manifest& manifest);
/// The manifest of an output folder after files were added to it: of these files as they are in `from`, and what the folder's manifest says of
/// its others but `retired`. Names that are no UTF-8 are left out. @returns none if the folder is a checkpoint, which nothing may be added to.
[[nodiscard]] std::optional<std::string> output_manifest(const std::string& folder, const std::string& from,
                                                         const std::vector<std::string>& names,
                                                         const std::vector<std::string>& retired = {});

/// @param where  Names the text in errors: the path of its file. @throws FormatError: it was changed, or is of a newer version.
[[nodiscard]] Manifest parse_manifest(std::string_view text, const std::string& where);
/// @throws FormatError as parse_manifest(), or if there is none; IoError.
[[nodiscard]] Manifest read_manifest(const std::string& folder);

/// Compares every file that the manifest names with what it says. Files beside them are no matter.
/// @returns one line for each that is missing or differs, "optimizer.safetensors: its bytes from 4194304 on were changed"; empty: all
///          is as it was written. @throws IoError if a file cannot be read.
[[nodiscard]] std::vector<std::string> damage(const std::string& folder, const Manifest& manifest);

}  // namespace qlorapp::files
