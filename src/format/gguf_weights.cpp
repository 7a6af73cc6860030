// SPDX-License-Identifier: Apache-2.0
#include "gguf_weights.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "ggml_blocks.hpp"
#include "gguf_config.hpp"

namespace qlorapp::format {
namespace {

/// The config has their values.
bool is_of_rope(std::string_view name) { return name.starts_with("rope_f"); }

/// Of values read from it: blocks are dequantized.
Dtype value_dtype(GgufType type) {
  return type == GgufType::kF16 ? Dtype::kF16 : type == GgufType::kBF16 ? Dtype::kBF16 : Dtype::kF32;
}

}  // namespace

GgufWeights::GgufWeights(const std::string& path) : file_(std::make_unique<GgufFile>(path)) {
  const ModelConfig config = parse_model_config(gguf_config_json(*file_), path);
  std::vector<std::string> order;
  std::map<std::string, std::vector<Piece>> pieces;
  std::set<std::string_view> used;
  for (GgufPart& part : gguf_parts(config)) {
    if (part.parameter.empty()) continue;
    const GgufEntry* const stored = file_->find(part.name);
    QLORAPP_CHECK_FORMAT(stored != nullptr && stored->shape == part.shape,
                         "[{}] the file must hold tensor {} of shape {}; it {}. Use another file of the model.", path, part.name,
                         joined(part.shape), stored == nullptr ? std::string("does not") : "has shape " + joined(stored->shape));
    used.insert(stored->name);
    std::string parameter = part.parameter;
    auto& own = pieces[parameter];
    if (own.empty()) order.push_back(parameter);
    own.push_back({std::move(part), stored, 0});
  }
  for (const GgufEntry& entry : file_->tensors()) {
    QLORAPP_CHECK_FORMAT(used.contains(entry.name) || is_of_rope(entry.name),
                         "[{}] tensor {} belongs to no parameter of {}. The model is of a kind that is not computed here.", path,
                         printable(entry.name), config.family->architecture);
  }
  for (const std::string& name : order) add(name, std::move(pieces[name]));
}

GgufWeights::~GgufWeights() = default;

void GgufWeights::add(const std::string& name, std::vector<Piece> pieces) {
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.part.first_row; });
  Parameter parameter;
  const GgufPart& first = pieces.front().part;
  parameter.type = pieces.front().stored->type;
  for (Piece& piece : pieces) {
    piece.first_row = parameter.rows;
    parameter.rows += piece.part.shape[0];
    QLORAPP_CHECK_FORMAT(piece.stored->type == parameter.type,
                         "[{}] tensors {} and {} must be of one type, because {} is made of both.", file_->path(), first.name,
                         piece.part.name, name);
  }
  parameter.columns = first.shape.size() > 1 ? first.shape.back() : 1;  // a bias has heads, too
  const GgufBlock& block = block_of(parameter.type);
  QLORAPP_CHECK_FORMAT(
      parameter.columns % block.elements == 0,
      "[{}] rows of tensor {} must be whole blocks of {}; they have {} elements. The file is damaged; fetch it again.",
      file_->path(), first.name, block.name, parameter.columns);
  parameter.row_bytes = parameter.columns / block.elements * block.bytes;
  std::vector<int64_t> shape = first.shape;
  shape[0] = parameter.rows;
  const auto index = static_cast<int64_t>(parameters_.size());
  if (block.elements > 1 && first.role == Role::kLinear) {
    const int64_t bytes = parameter.rows * parameter.row_bytes;
    parameter.blocks = StoredBlocks{{name, Dtype::kU8, {bytes, 1}, index, bytes}, parameter.type};
  }
  const Dtype dtype = first.factor == 1 && !first.adds_one ? value_dtype(parameter.type) : Dtype::kF32;
  const int64_t bytes = parameter.rows * (dtype == Dtype::kF32 ? parameter.columns * 4 : parameter.row_bytes);
  tensors_.push_back({name, dtype, std::move(shape), index, bytes});
  parameter.pieces = std::move(pieces);
  parameters_.push_back(std::move(parameter));
}

const StoredBlocks* GgufWeights::blocks_of(const TensorEntry& tensor) const {
  const auto& blocks = parameters_.at(static_cast<size_t>(tensor.offset)).blocks;
  return blocks ? &*blocks : nullptr;
}

void GgufWeights::read_piece(const Piece& piece, int64_t row_bytes, int64_t first, int64_t count, std::byte* into) const {
  if (piece.part.heads == 0) {
    file_->read(*piece.stored, first * row_bytes, {into, static_cast<size_t>(count * row_bytes)});
    return;
  }
  // Pairs that turn are neighbors in the file, and in the two halves of a head here.
  const int64_t rows = piece.part.shape[0] / piece.part.heads, half = rows / 2;
  const int64_t begin = first / rows * rows, end = (first + count + rows - 1) / rows * rows;
  std::vector<std::byte> heads(static_cast<size_t>((end - begin) * row_bytes));
  file_->read(*piece.stored, begin * row_bytes, heads);
  for (int64_t row = first; row < first + count; ++row) {
    const int64_t head = row / rows, within = row % rows;
    const int64_t stored = head * rows + within % half * 2 + within / half;
    std::memcpy(into + (row - first) * row_bytes, heads.data() + (stored - begin) * row_bytes, static_cast<size_t>(row_bytes));
  }
}

void GgufWeights::read_rows(const Parameter& parameter, int64_t first, int64_t count, std::span<std::byte> into) const {
  for (const Piece& piece : parameter.pieces) {
    const int64_t begin = std::max(first, piece.first_row), end = std::min(first + count, piece.first_row + piece.part.shape[0]);
    if (begin < end)
      read_piece(piece, parameter.row_bytes, begin - piece.first_row, end - begin,
                 into.data() + (begin - first) * parameter.row_bytes);
  }
}

void GgufWeights::read_values(const Parameter& parameter, int64_t first, int64_t count, std::span<float> into) const {
  std::vector<std::byte> rows(static_cast<size_t>(count * parameter.row_bytes));
  read_rows(parameter, first, count, rows);
  dequantize_row(parameter.type, rows, into);
  const GgufPart& part = parameter.pieces.front().part;
  if (part.factor != 1) {
    for (float& value : into) value = static_cast<float>(value / part.factor);
  }
  if (part.adds_one) {
    for (float& value : into) value -= 1;
  }
}

void GgufWeights::read(const TensorEntry& tensor, int64_t offset, std::span<std::byte> into) const {
  const auto bytes = static_cast<int64_t>(into.size());
  QLORAPP_CHECK_VALUE(offset >= 0 && offset <= tensor.nbytes && bytes <= tensor.nbytes - offset,
                      "[{}] bytes {} to {} must be within tensor {}, which has {}.", path(), offset, offset + bytes,
                      printable(tensor.name), tensor.nbytes);
  if (into.empty()) return;
  const Parameter& parameter = parameters_.at(static_cast<size_t>(tensor.offset));
  const bool as_stored = tensor.dtype != Dtype::kF32;
  const int64_t row_bytes = as_stored ? parameter.row_bytes : parameter.columns * 4;
  const int64_t first = offset / row_bytes, count = (offset + bytes + row_bytes - 1) / row_bytes - first;
  std::vector<std::byte> rows(static_cast<size_t>(count * row_bytes));
  if (as_stored) {
    read_rows(parameter, first, count, rows);
    QLORAPP_CHECK_FORMAT(tensor.dtype != Dtype::kU8 || scales_are_finite(parameter.type, rows),
                         "[{}] tensor {} has a scale that is not finite. The file is damaged; fetch it again.", path(),
                         parameter.pieces.front().part.name);
  } else {
    std::vector<float> values(static_cast<size_t>(count * parameter.columns));
    read_values(parameter, first, count, values);
    std::memcpy(rows.data(), values.data(), rows.size());
  }
  std::memcpy(into.data(), rows.data() + (offset - first * row_bytes), into.size());
}

}  // namespace qlorapp::format
