// SPDX-License-Identifier: Apache-2.0
#include "io/adapter_base.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "adapter_file.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "io/tensor_file.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"
#include "nn/base_fingerprint.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/compute_dtype.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kSchema = 1, kMost = int64_t{1} << 40;
constexpr int64_t kOfTable = 32, kOfNorms = 16;
/// bfloat16 rounds by 2^-9 of a value, each way; float16 by 2^-25 near zero.
constexpr double kRelative = 0x1p-7, kAbsolute = 0x1p-20;

struct Sampled {
  std::string name;
  int64_t row, column;
  double value;
};

struct AdapterBase {
  std::string storage, fingerprint;  ///< Empty: not stored.
  std::vector<Sampled> sample;
};

/// The number at a place of a base; none: it has no such place.
using ReadNumber = std::function<std::optional<double>(const Sampled& place)>;

/// Tensors that are never quantized, by their names in a checkpoint.
std::map<std::string, at::Tensor, std::less<>> plain_tensors(const CausalLM& model) {
  std::map<std::string, at::Tensor, std::less<>> tensors;
  for (const format::Parameter& parameter : model.decoder().parameters()) {
    if (parameter.role != format::Role::kLinear) tensors[parameter.name()] = model.decoder().dense(parameter);
  }
  return tensors;
}

std::optional<double> number_of(const at::Tensor& tensor, const Sampled& place) {
  const at::Tensor rows = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
  if (rows.dim() != 2 || place.row >= rows.size(0) || place.column >= rows.size(1)) return std::nullopt;
  return rows[place.row][place.column].item<double>();
}

std::optional<double> number_of(const format::TensorLocation& location, const Sampled& place) {
  const format::TensorEntry& entry = *location.tensor;
  const at::ScalarType type = scalar_type_of(entry.dtype, entry.name);
  const int64_t rows = entry.shape.size() == 1 ? 1 : entry.shape.front(), columns = entry.shape.empty() ? 0 : entry.shape.back();
  if (entry.shape.size() > 2 || !at::isFloatingType(type) || place.row >= rows || place.column >= columns) return std::nullopt;
  at::Tensor one = at::empty({1}, at::TensorOptions().dtype(type));
  const int64_t at = (place.row * columns + place.column) * static_cast<int64_t>(one.element_size());
  location.file->read(entry, at, bytes_of(one));
  return one.item<double>();
}

std::string storage_of(const CausalLM& model) {
  std::string text = message("computes in {}", dtype_text(model.dtype()));
  if (model.config().dtype) text += message("; stored as {}", format::torch_name(*model.config().dtype));
  for (const DecoderBlock& block : model.blocks()) {
    for (const FrozenWeight& weight : model.decoder().projections(block.index())) {
      if (!weight.quantized.defined()) continue;
      const QuantizedTensor& four_bit = weight.quantized;
      return text + message("; {} of {}, {} scales", to_string(four_bit.quant_type), four_bit.block_size,
                            four_bit.double_quantized() ? "quantized" : "float");
    }
  }
  return text;
}

std::string fingerprint_of(const CausalLM& model) { return fingerprint_text(base_fingerprint(model).without_scales); }

std::optional<AdapterBase> read_adapter_base(const std::string& folder) {
  if (!files::has_entry(folder, kAdapterBase)) return std::nullopt;
  const std::string path = files::path_in(folder, kAdapterBase);
  const format::Json json = files::read_json_inside(path, {.max_bytes = 1 << 20});
  format::JsonFields fields(json, path);
  AdapterBase base{fields.text("storage").value_or(""), fields.text("fingerprint").value_or(""), {}};
  const format::Json* const sample = fields.value("sample");
  const auto is_place = [](const format::Json& entry) {
    const auto whole = [](const format::Json& number) {
      return number.is_number_integer() && number.get<int64_t>() >= 0 && number.get<int64_t>() < kMost;
    };
    return entry.is_array() && entry.size() == 4 && entry[0].is_string() && whole(entry[1]) && whole(entry[2]) &&
           entry[3].is_number();
  };
  QLORAPP_CHECK_FORMAT(fields.integer("schema", 0, kMost).value_or(0) == kSchema && sample != nullptr && sample->is_array() &&
                           std::all_of(sample->begin(), sample->end(), is_place),
                       "[{}] must have schema {} and a sample of [name, row, column, value]. Remove it.", path, kSchema);
  for (const format::Json& entry : *sample)
    base.sample.push_back({entry[0].get<std::string>(), entry[1].get<int64_t>(), entry[2].get<int64_t>(), entry[3].get<double>()});
  return base;
}

/// Where the sample differs first.
const Sampled* other_number(const AdapterBase& base, const ReadNumber& read, double& found) {
  for (const Sampled& place : base.sample) {
    const std::optional<double> here = read(place);
    if (!here) continue;
    found = *here;
    const double largest = std::max(std::abs(*here), std::abs(place.value));
    if (!(std::abs(*here - place.value) <= kRelative * largest + kAbsolute)) return &place;
  }
  return nullptr;
}

/// @returns whether the numbers are those of the base.
bool check_sample(const std::string& folder, const AdapterBase& base, const ReadNumber& read) {
  double found = 0;
  const Sampled* const place = other_number(base, read, found);
  if (place == nullptr) return true;
  log_warning(
      message("[adapter] {} was trained on another base: there, {}[{}, {}] was {:.6g}; here it is {:.6g}. Results are those of "
              "neither. Give "
              "the base that it was trained on.",
              folder, place->name, place->row, place->column, place->value, found));
  return false;
}

}  // namespace

std::string adapter_base_text(const CausalLM& model, const std::string& folder) {
  if (model.decoder().is_sharded()) return "";
  const auto tensors = plain_tensors(model);
  format::Json sample = format::Json::array();
  const auto add = [&](const std::string& name, int64_t row, int64_t column) {
    if (const auto value = number_of(tensors.at(name), {name, row, column, 0})) sample.push_back({name, row, column, *value});
  };
  const int64_t words = model.config().vocab_size, width = model.config().hidden_size, layers = model.config().num_hidden_layers;
  const std::vector<format::Parameter> norms = format::parameters(model.config(), format::Role::kNorm);
  const auto norm_of_layer = [&](int64_t layer) {  // the first; -1: the last norm
    return std::find_if(norms.begin(), norms.end(), [&](const format::Parameter& norm) { return norm.layer == layer; })->name();
  };
  const std::string table = format::parameters(model.config(), format::Role::kEmbedding).front().name();
  for (int64_t i = 0; i < kOfTable; ++i) add(table, i * words / kOfTable, i * 37 % width);
  for (int64_t i = 0; i < kOfNorms; ++i) add(norm_of_layer(i % 2 == 0 ? -1 : i * layers / kOfNorms), 0, i * width / kOfNorms);
  format::Json json{{"schema", kSchema}, {"storage", storage_of(model)}};
  // A checkpoint does without: its run_state.json has a fingerprint, and is written often.
  if (!files::file_name(folder).starts_with(files::kCheckpointPrefix)) json["fingerprint"] = fingerprint_of(model);
  json["sample"] = std::move(sample);
  return format::dump_python_json(json, {.indent = 1}) + "\n";
}

void check_adapter_base(const std::string& folder, const CausalLM& model) {
  if (model.decoder().is_sharded()) return;
  const std::optional<AdapterBase> base = read_adapter_base(folder);
  if (!base) return;
  const auto tensors = plain_tensors(model);
  const bool same = check_sample(folder, *base, [&](const Sampled& place) {
    const auto found = tensors.find(place.name);
    return found == tensors.end() ? std::nullopt : number_of(found->second, place);
  });
  if (!same || base->fingerprint.empty() || base->storage != storage_of(model) || base->fingerprint == fingerprint_of(model))
    return;
  log_warning(message(
      "[adapter] {} was trained on a base of the same form with other bytes or another config. Was this one damaged, quantized by "
      "another program, or changed?",
      folder));
}

void check_adapter_base(const std::string& folder, const format::TensorFiles& files) {
  const std::optional<AdapterBase> base = read_adapter_base(folder);
  if (!base) return;
  (void)check_sample(folder, *base, [&](const Sampled& place) -> std::optional<double> {
    const format::TensorLocation* const found = files.find(place.name);
    return found == nullptr ? std::nullopt : number_of(*found, place);
  });
}

}  // namespace qlorapp
