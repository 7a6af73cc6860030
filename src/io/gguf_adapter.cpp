// SPDX-License-Identifier: Apache-2.0
#include "gguf_adapter.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "adapter_file.hpp"
#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "file_folders.hpp"
#include "files/folder.hpp"
#include "format/ggml_blocks.hpp"
#include "format/gguf.hpp"
#include "format/gguf_model.hpp"
#include "gguf_rows.hpp"
#include "io/stored_names.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/format/adapter_config.hpp"

namespace qlorapp {
namespace {

using format::GgufEntry;
using format::GgufFile;

at::Tensor values_of(const GgufFile& file, const GgufEntry& entry) {
  std::vector<std::byte> bytes(static_cast<size_t>(entry.nbytes()));
  file.read(entry, 0, bytes);
  at::Tensor values = at::empty(entry.shape, at::kFloat);
  format::dequantize_row(entry.type, bytes, {values.mutable_data_ptr<float>(), static_cast<size_t>(values.numel())});
  return values;
}

class AdapterReader {
 public:
  AdapterReader(const std::string& path, const format::ModelConfig& base) : file_(path), base_(base) {
    const auto architecture = file_.require<std::string>("general.architecture");
    QLORAPP_CHECK_FORMAT(architecture == base.family->gguf.architecture,
                         "[{}] the adapter is for '{}'; the base is of '{}'. Give its own base.", path, architecture,
                         base.family->gguf.architecture);
    alpha_ = file_.get<double>("adapter.lora.alpha").value_or(0);
  }

  void write(const std::string& folder) {
    for (const format::GgufPart& part : format::gguf_parts(base_)) add(part);
    for (const auto& [module, pair] : pairs_) put(module, ".lora_B.weight", stacked(module, pair));
    for (const GgufEntry& entry : file_.tensors()) {
      QLORAPP_CHECK_FORMAT(used_.contains(entry.name),
                           "[{}] tensor {} belongs to no weight of the base. Give the adapter's own base.", file_.path(),
                           entry.name);
    }
    QLORAPP_CHECK_FORMAT(!tensors_.empty(), "[{}] the file holds no matrices.", file_.path());
    write_tensors(files::path_in(folder, kAdapterWeights), tensors_);
    format::AdapterConfig config;
    config.r = rank_;
    config.lora_alpha = alpha_ > 0 ? alpha_ : static_cast<double>(rank_);
    config.task_type = "CAUSAL_LM";
    config.target_modules = {modules_.begin(), modules_.end()};
    config.rank_pattern = ranks_;
    if (alpha_ <= 0) {  // then nothing is scaled
      for (const auto& [module, rank] : ranks_) config.alpha_pattern[module] = static_cast<double>(rank);
    }
    format::save_adapter_config(config, folder);
  }

 private:
  const GgufEntry* find(const format::GgufPart& part, std::string_view suffix) {
    const GgufEntry* const found = file_.find(part.name + std::string(suffix));
    if (found != nullptr) used_.insert(found->name);
    return found;
  }

  void add(const format::GgufPart& part) {
    if (part.parameter.empty()) return;
    const std::string module = part.parameter.substr(0, part.parameter.size() - kWeightSuffix.size());
    rows_[module] += part.shape[0];
    const GgufEntry *const a = find(part, ".lora_a"), *const b = find(part, ".lora_b");
    if (a == nullptr && b == nullptr) return;
    const bool is_table = part.role == format::Role::kEmbedding;
    const bool fits = a != nullptr && b != nullptr && a->shape.size() == 2 && b->shape.size() == 2 &&
                      (is_table ? a->shape[0] == part.shape[0] && b->shape[0] == part.shape[1] && a->shape[1] == b->shape[1]
                                : a->shape[1] == part.shape.back() && b->shape[0] == part.shape[0] && a->shape[0] == b->shape[1]);
    QLORAPP_CHECK_FORMAT(fits, "[{}] the matrices of {} must be a pair whose product has shape {}. Give the adapter's own base.",
                         file_.path(), part.name, joined(part.shape));
    const at::Tensor values = values_of(file_, *a);
    const int64_t rank = b->shape[1];
    if (is_table) {
      put(module, ".lora_embedding_A", values.t());
      put(module, ".lora_embedding_B", values_of(file_, *b));
    } else {
      Pair& pair = pairs_[module];
      if (!pair.a.defined()) {
        pair.a = values;
        put(module, ".lora_A.weight", values);
      }
      QLORAPP_CHECK_FORMAT(at::equal(pair.a, values),
                           "[{}] {} and the other half of {} must have the same matrix A, as one PEFT module has; they do not. "
                           "Merge the adapter with llama.cpp's export-lora.",
                           file_.path(), part.name, module);
      pair.b.emplace_back(part.first_row, rows_back(part, values_of(file_, *b)));
    }
    if (rank_ == 0) rank_ = rank;
    ranks_[module] = rank;
    modules_.insert(module);
  }

  /// Of a module; a file may hold it in halves, whose rows lie below each other.
  struct Pair {
    at::Tensor a;
    std::vector<std::pair<int64_t, at::Tensor>> b;  ///< By their first row.
  };

  /// A half that the file has not changes nothing.
  [[nodiscard]] at::Tensor stacked(const std::string& module, const Pair& pair) const {
    at::Tensor all = at::zeros({rows_.at(module), pair.a.size(0)});
    for (const auto& [first, rows] : pair.b) all.narrow(0, first, rows.size(0)).copy_(rows);
    return all;
  }

  void put(const std::string& module, const char* name, const at::Tensor& tensor) {
    tensors_.emplace_back(message("{}{}{}", kPeftPrefix, module, name), tensor.contiguous());
  }

  GgufFile file_;
  const format::ModelConfig& base_;
  double alpha_ = 0;
  int64_t rank_ = 0;
  std::map<std::string, int64_t> ranks_, rows_;
  std::map<std::string, Pair> pairs_;
  std::set<std::string> modules_;
  std::set<std::string, std::less<>> used_;
  NamedTensors tensors_;
};

}  // namespace

bool is_gguf_adapter(const std::string& path) { return GgufFile(path).get<std::string>("general.type") == "adapter"; }

std::string adapter_folder(const std::string& path, const format::ModelConfig& base) {
  const at::NoGradGuard no_grad;
  const std::string purpose = message("adapter over {} {} {}", base.family->architecture, base.hidden_size, base.num_hidden_layers);
  return folder_for_file(path, purpose, [&](const std::string& folder) { AdapterReader(path, base).write(folder); });
}

}  // namespace qlorapp
