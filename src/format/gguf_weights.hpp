// SPDX-License-Identifier: Apache-2.0
/// A GGUF file as the checkpoint of its model: tensors under the names that a safetensors checkpoint has, in 16
/// bits where they are stored so, else in float32.
///
/// Rows that llama.cpp keeps in another order are put back, layers that it keeps as two are joined, and what its norms have on top is taken
/// off again; blocks are dequantized as they are read. The blocks of a weight themselves, rows in this order, are `blocks_of` it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gguf.hpp"
#include "gguf_model.hpp"
#include "qlorapp/format/model_config.hpp"
#include "tensor_source.hpp"

namespace qlorapp::format {

/// A weight as the file stores it.
struct StoredBlocks {
  TensorEntry bytes;  ///< U8 (bytes, 1).
  GgufType type;
};

class GgufWeights final : public TensorSource {
 public:
  /// @throws IoError, FormatError as GgufFile and gguf_config_json(); FormatError naming the tensor that is missing, of another shape, or of no
  ///         use to the model.
  explicit GgufWeights(const std::string& path);
  ~GgufWeights() override;

  [[nodiscard]] const std::string& path() const noexcept override { return file_->path(); }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return tensors_; }
  /// Of a weight in blocks, by its entry in tensors() or a renamed copy of it; null for others.
  [[nodiscard]] const StoredBlocks* blocks_of(const TensorEntry& tensor) const;

  void read(const TensorEntry& tensor, int64_t offset, std::span<std::byte> into) const override;
  void check_unchanged() const override { file_->check_unchanged(); }

 private:
  /// Rows of a parameter that one tensor of the file holds.
  struct Piece {
    GgufPart part;
    const GgufEntry* stored;
    int64_t first_row;
  };
  struct Parameter {
    std::vector<Piece> pieces;
    GgufType type = GgufType::kF32;
    int64_t rows = 0, columns = 0, row_bytes = 0;
    std::optional<StoredBlocks> blocks;
  };
  void add(const std::string& name, std::vector<Piece> pieces);
  void read_rows(const Parameter& parameter, int64_t first, int64_t count, std::span<std::byte> into) const;
  void read_piece(const Piece& piece, int64_t row_bytes, int64_t first, int64_t count, std::byte* into) const;
  void read_values(const Parameter& parameter, int64_t first, int64_t count, std::span<float> into) const;

  std::unique_ptr<GgufFile> file_;
  std::vector<TensorEntry> tensors_;
  std::vector<Parameter> parameters_;  ///< In the order of tensors_, whose offsets are indices here.
};

}  // namespace qlorapp::format
