// SPDX-License-Identifier: Apache-2.0
/// The tensors of a model folder, whichever file they lie in.
///
/// A folder holds `model.safetensors`, or `model.safetensors.index.json` whose "weight_map" says for each tensor which shard
/// holds it. The index is a file like any other: a shard is a plain file name ([A-Za-z0-9._-]+.safetensors) in this very
/// folder, never a way out of it. Pickled weights (.bin, .pt …) are programs, not data, and are not read at all. A folder that stands for a
/// GGUF file (gguf_folders.hpp) has that file's tensors.
///
/// Source: transformers' save_pretrained; huggingface_hub's cache layout for the one kind of link that is followed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/gguf_weights.hpp"
#include "format/safetensors.hpp"

namespace qlorapp::format {

struct TensorLocation {
  const TensorSource* file = nullptr;
  const TensorEntry* tensor = nullptr;
};

/// All files stay open. Reading is const and thread-safe. Locations live as long as the TensorFiles, moved or not.
class TensorFiles {
 public:
  /// @throws FormatError, IoError: no such folder; no safetensors in it; a shard that is missing, truncated or not where it
  ///         must be; a tensor that its shard lacks; a tensor in two shards.
  explicit TensorFiles(std::string folder);
  /// Whether a folder has some.
  [[nodiscard]] static bool are_in(const std::string& folder);

  [[nodiscard]] const std::string& folder() const noexcept { return folder_; }
  [[nodiscard]] const std::vector<std::unique_ptr<const TensorSource>>& files() const noexcept { return files_; }

  /// Sorted by name.
  [[nodiscard]] std::span<const TensorLocation> tensors() const noexcept { return tensors_; }
  /// Those whose name begins with `prefix`, sorted.
  [[nodiscard]] std::span<const TensorLocation> with_prefix(std::string_view prefix) const;
  /// @returns the tensor of that name, or nullptr.
  [[nodiscard]] const TensorLocation* find(std::string_view name) const;
  /// @throws FormatError naming the folder, with the nearest name it has.
  [[nodiscard]] const TensorLocation& at(std::string_view name) const;

  /// Finds each tensor under name_of(its name) from here on; the files stay as they are. Locations that were handed out keep the old names.
  /// @throws FormatError if two tensors have one name then.
  void rename(const std::function<std::string(const std::string&)>& name_of);

  /// The blocks that a GGUF file stores a weight in; null for every other. Their location reads them.
  [[nodiscard]] const StoredBlocks* blocks_of(std::string_view name) const;

  /// Reads into.size() bytes of a tensor, from its byte `offset` on. @throws as TensorSource::read.
  void read(std::string_view name, int64_t offset, std::span<std::byte> into) const;

 private:
  void add_all(std::unique_ptr<const TensorSource> file);
  void open_index();

  std::string folder_;
  std::vector<std::unique_ptr<const TensorSource>> files_;
  const GgufWeights* gguf_ = nullptr;  ///< The one of files_, if it is that.
  std::vector<TensorLocation> tensors_;
  std::vector<std::unique_ptr<TensorEntry>> renamed_;
};

}  // namespace qlorapp::format
