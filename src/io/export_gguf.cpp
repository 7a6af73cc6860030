// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "export_targets.hpp"
#include "files/folder.hpp"
#include "format/ggml_blocks.hpp"
#include "format/gguf.hpp"
#include "format/gguf_model.hpp"
#include "format/model_folder.hpp"
#include "gguf_rows.hpp"
#include "io/tensor_file.hpp"
#include "merged_model.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/gguf.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "text/gguf_vocabulary.hpp"

namespace qlorapp {
namespace {

using format::GgufType;
using format::Role;

/// A kind of file: its number in general.file_type, the type of most weights, and of those that suffer most.
struct FileType {
  std::string_view name;
  uint32_t number;
  GgufType most, careful;
};
constexpr auto kFileTypes = std::to_array<FileType>({{"F32", 0, GgufType::kF32, GgufType::kF32},
                                                     {"F16", 1, GgufType::kF16, GgufType::kF16},
                                                     {"BF16", 32, GgufType::kBF16, GgufType::kBF16},
                                                     {"Q8_0", 7, GgufType::kQ8_0, GgufType::kQ8_0},
                                                     {"Q6_K", 18, GgufType::kQ6_K, GgufType::kQ6_K},
                                                     {"Q5_K_M", 17, GgufType::kQ5_K, GgufType::kQ6_K},
                                                     {"Q4_K_M", 15, GgufType::kQ4_K, GgufType::kQ6_K},
                                                     {"Q4_0", 2, GgufType::kQ4_0, GgufType::kQ6_K}});

constexpr float kLeastImportance = 1e-3F;  ///< Of the mean.

const FileType& file_type(std::string_view name) {
  const auto found = std::ranges::find(kFileTypes, name, &FileType::name);
  QLORAPP_CHECK_VALUE(found != kFileTypes.end(), "[export] type must be one of {}; got '{}'.{}", joined(gguf_types()), name,
                      did_you_mean(name, gguf_types()));
  return *found;
}

class Exporter {
 public:
  Exporter(const std::string& model, const std::string& adapter, const ExportOptions& options)
      : type_(file_type(options.type.empty() ? "Q4_K_M" : options.type)),
        merge_(options.merge),
        model_(model, adapter, merge_),
        config_(config_of(model, model_.result())),
        parts_(format::gguf_parts(config_)),
        metadata_(metadata_of(model, adapter, options)),
        measure_(options.importance),
        progress_(options.merge.progress) {
    const bool is_searched = type_.most != GgufType::kQ8_0 && format::block_of(type_.most).elements > 1;
    QLORAPP_CHECK_VALUE(!measure_ || is_searched, "[export] importance has a use with Q6_K and below; type is {}.", type_.name);
    for (const format::GgufPart& part : parts_) tensors_.push_back({part.name, part.shape, stored_type(part)});
  }

  void write(const std::string& file) {
    if (measure_) importance_ = measure_();
    format::GgufWriter writer(file, metadata_, tensors_);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const at::Tensor values = values_of(parts_[i]);
      write_rows(values, importance_of(parts_[i]), tensors_[i], writer);
      if (progress_) progress_(static_cast<int64_t>(i) + 1, std::ssize(parts_));
    }
    model_.check_unchanged();
    writer.finish();
  }

 private:
  /// Of what is written: an adapter may make the head a table of its own, and bring tables of another size.
  static format::ModelConfig config_of(const std::string& model, const MergedTensors& result) {
    format::ModelConfig config = format::settled_config(model);
    if (result.separates_head) config.tie_word_embeddings = false;
    if (result.vocab_size) config.vocab_size = *result.vocab_size;
    return config;
  }

  [[nodiscard]] format::GgufMetadata metadata_of(const std::string& model, const std::string& adapter,
                                                 const ExportOptions& options) const {
    const std::string text = !adapter.empty() && TextFiles::has_tokenizer(adapter) ? adapter : model;
    format::GgufMetadata out{{"general.architecture", std::string(config_.family->gguf.architecture)},
                             {"general.type", std::string("model")},
                             {"general.name", files::file_name(adapter.empty() ? model_path(model) : adapter)},
                             {"general.quantization_version", uint32_t{2}},
                             {"general.file_type", type_.number}};
    for (auto& entry : format::gguf_hyperparameters(config_)) out.push_back(std::move(entry));
    std::optional<ChatTemplate> chat;
    if (!options.chat_template.empty()) chat = ChatTemplate::choose(options.chat_template, text);
    else chat = ChatTemplate::from_folder(text);
    GgufVocabulary vocabulary = gguf_vocabulary(text, model, config_.vocab_size, chat ? &*chat : nullptr);
    if (vocabulary.other_ends.size() > 2) {
      log_warning(message("[export] a GGUF file has three tokens that end an answer; {} others of this model are left out.",
                          vocabulary.other_ends.size() - 2));
    }
    out.emplace_back("tokenizer.ggml.model", std::move(vocabulary.model));
    out.emplace_back("tokenizer.ggml.pre", std::move(vocabulary.pre));
    out.emplace_back("tokenizer.ggml.tokens", std::move(vocabulary.tokens));
    if (!vocabulary.scores.empty()) {
      out.emplace_back("tokenizer.ggml.scores", std::move(vocabulary.scores));
      out.emplace_back("tokenizer.ggml.add_space_prefix", vocabulary.adds_space);
    }
    out.emplace_back("tokenizer.ggml.token_type", std::move(vocabulary.types));
    if (!vocabulary.merges.empty()) out.emplace_back("tokenizer.ggml.merges", std::move(vocabulary.merges));
    const auto add_id = [&](const char* key, const std::optional<TokenId>& id) {
      if (id) out.emplace_back(key, static_cast<uint32_t>(*id));
    };
    add_id("tokenizer.ggml.bos_token_id", vocabulary.bos);
    add_id("tokenizer.ggml.eos_token_id", vocabulary.eos);
    add_id("tokenizer.ggml.padding_token_id", vocabulary.pad);
    add_id("tokenizer.ggml.unknown_token_id", vocabulary.unknown);
    for (size_t i = 0; i < std::min<size_t>(vocabulary.other_ends.size(), 2); ++i)
      add_id(i == 0 ? "tokenizer.ggml.eot_token_id" : "tokenizer.ggml.eom_token_id", vocabulary.other_ends[i]);
    out.emplace_back("tokenizer.ggml.add_bos_token", vocabulary.adds_bos);
    out.emplace_back("tokenizer.ggml.add_eos_token", vocabulary.adds_eos);
    if (chat) out.emplace_back("tokenizer.chat_template", chat->jinja());
    return out;
  }

  /// llama.cpp's rule for _M: the head, and values and down projections of the first and last eighth of the layers and of each third between.
  [[nodiscard]] bool is_careful(const format::GgufPart& part) const {
    if (part.role == Role::kHead || (part.role == Role::kEmbedding && config_.tie_word_embeddings)) return true;
    const int64_t n = config_.num_hidden_layers, i = part.layer;
    const bool chosen = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    const bool named = part.name.ends_with("attn_v.weight") || part.name.ends_with("ffn_down.weight");
    return type_.name.ends_with("_M") && named && chosen;
  }

  [[nodiscard]] GgufType stored_type(const format::GgufPart& part) const {
    if (part.role == Role::kNorm || part.role == Role::kBias) return GgufType::kF32;
    for (const GgufType type : {is_careful(part) ? type_.careful : type_.most, GgufType::kQ8_0}) {
      if (part.shape.back() % format::block_of(type).elements == 0) return type;
    }
    return GgufType::kF16;
  }

  /// The tensor of a part, (rows, columns) or (elements), contiguous.
  [[nodiscard]] at::Tensor values_of(const format::GgufPart& part) const {
    if (part.parameter.empty()) return at::tensor(at::ArrayRef<float>(part.values));
    const MergedTensor* const stored = model_.find(part.parameter);
    QLORAPP_CHECK_FORMAT(stored != nullptr, "[export] {} must hold '{}', as its config.json says. Use the whole checkpoint.",
                         model_.files().folder(), part.parameter);
    const at::Tensor whole = model_.values(*stored);
    QLORAPP_CHECK_FORMAT(whole.size(0) >= part.first_row + part.shape[0] && whole.size(-1) == part.shape.back(),
                         "[export] '{}' must have at least {} rows of {}; it has shape {}. Is it of another config.json?",
                         part.parameter, part.first_row + part.shape[0], part.shape.back(), joined(whole.sizes()));
    at::Tensor values = rows_of(part, whole);
    if (part.adds_one) values = values.to(at::kFloat).add_(1.0);
    if (part.factor != 1) values = values.to(at::kFloat).mul(part.factor);
    return values.contiguous();
  }

  /// Of each column; empty: all alike. Channels that the rows leave silent count a little, or their weights would be anything.
  [[nodiscard]] std::vector<float> importance_of(const format::GgufPart& part) const {
    const auto found = importance_.find(part.parameter);
    if (part.role != Role::kLinear || found == importance_.end()) return {};
    std::vector<float> weights = found->second;
    QLORAPP_CHECK_VALUE(std::ssize(weights) == part.shape.back(),
                        "[export] importance of '{}' must have an entry for each of its {} columns; it has {}.", part.parameter,
                        part.shape.back(), weights.size());
    double sum = 0;
    for (const float weight : weights) {
      QLORAPP_CHECK_VALUE(std::isfinite(weight) && weight >= 0,
                          "[export] importance of '{}' must be finite and not below 0; got {}.", part.parameter, weight);
      sum += weight;
    }
    const auto mean = static_cast<float>(sum / static_cast<double>(weights.size()));
    if (mean <= 0) return {};
    for (float& weight : weights) weight = weight / mean + kLeastImportance;
    return weights;
  }

  static void write_rows(const at::Tensor& values, std::span<const float> importance, const format::GgufTensor& tensor,
                         format::GgufWriter& writer) {
    const auto write = [&](const at::Tensor& bytes) { writer.write(bytes_of(bytes)); };
    switch (tensor.type) {
      case GgufType::kF32:
        return write(values.to(at::kFloat));
      case GgufType::kF16: {
        const at::Tensor halves = values.to(at::kHalf);
        QLORAPP_CHECK_FORMAT(halves.isfinite().all().item<bool>(),
                             "[export] tensor '{}' has numbers above 65,504, the largest of F16. Use BF16.", tensor.name);
        return write(halves);
      }
      case GgufType::kBF16:
        return write(values.to(at::kBFloat16));
      default:
        break;
    }
    const format::GgufBlock& block = format::block_of(tensor.type);
    const int64_t columns = tensor.shape.back(), rows = values.numel() / columns,
                  row_bytes = columns / block.elements * block.bytes;
    const int64_t most = std::max<int64_t>(1, (int64_t{16} << 20) / columns);  // rows at a time
    const at::Tensor flat = values.reshape({rows, columns});
    const at::Tensor bytes = at::empty({std::min(most, rows), row_bytes}, at::kByte);
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = std::min(most, rows - first);
      const at::Tensor some = flat.narrow(0, first, count).to(at::kFloat).contiguous();
      const auto* const from = some.const_data_ptr<float>();
      auto* const into = static_cast<std::byte*>(bytes.mutable_data_ptr());
      at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          format::quantize_row(tensor.type, {from + row * columns, static_cast<size_t>(columns)}, importance,
                               {into + row * row_bytes, static_cast<size_t>(row_bytes)});
        }
      });
      write(bytes.narrow(0, 0, count));
    }
  }

  const FileType& type_;
  MergeOptions merge_;
  MergedModel model_;
  format::ModelConfig config_;
  std::vector<format::GgufPart> parts_;
  format::GgufMetadata metadata_;
  std::vector<format::GgufTensor> tensors_;
  std::function<Importance()> measure_;
  Importance importance_;
  std::function<void(int64_t, int64_t)> progress_;
};

}  // namespace

std::span<const std::string_view> gguf_types() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> out;
    for (const FileType& type : kFileTypes) out.push_back(type.name);
    return out;
  }();
  return names;
}

void export_gguf(const std::string& model, const std::string& adapter, const std::string& file, const ExportOptions& options) {
  Exporter(model, adapter, options).write(file);
}

}  // namespace qlorapp
