// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/merge.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "json/python_json.hpp"
#include "merged_folder.hpp"
#include "merged_model.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

void write_values(format::SafetensorsWriter& writer, const at::Tensor& values) {
  writer.write({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
}

class Merger {
 public:
  Merger(const std::string& model, const std::string& adapter, const MergeOptions& options)
      : model_(model, adapter, options), adapter_folder_(adapter), options_(options) {}

  void write(const std::string& output) {
    files::make_folders("merge", output);
    write_shards(output);
    model_.check_unchanged();
    write_files_beside_weights(model_.files().folder(), adapter_folder_, output,
                               {model_.dtype_name(), model_.result().separates_head, model_.result().vocab_size});
  }

 private:
  /// In the order of names, each as full as it may be.
  [[nodiscard]] std::vector<std::vector<const MergedTensor*>> shards() const {
    std::vector<std::vector<const MergedTensor*>> shards(1);
    int64_t size = 0;
    for (const MergedTensor& output : model_.result().tensors) {
      const int64_t bytes = output.nbytes();
      if (!shards.back().empty() && size + bytes > options_.max_shard_size.count) {
        shards.emplace_back();
        size = 0;
      }
      shards.back().push_back(&output);
      size += bytes;
    }
    return shards;
  }

  void write_shards(const std::string& folder) const {
    const auto shards = this->shards();
    format::Json weight_map = format::Json::object();
    int64_t parameters = 0, bytes = 0, done = 0;
    for (size_t i = 0; i < shards.size(); ++i) {
      std::array<char, 64> name{};
      std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
      const std::string file = shards.size() == 1 ? "model.safetensors" : name.data();
      std::vector<format::TensorSpec> specs;
      std::map<std::string_view, const MergedTensor*> by_name;
      for (const MergedTensor* output : shards[i]) {
        specs.push_back({output->name, output->dtype, output->shape});
        by_name[output->name] = output;
        weight_map[output->name] = file;
        parameters += output->numel();
        bytes += output->nbytes();
      }
      format::SafetensorsWriter writer(files::path_in(folder, file), std::move(specs), {{"format", "pt"}});
      for (const format::TensorEntry& entry : writer.tensors()) {
        const MergedTensor& output = *by_name.at(entry.name);
        if (output.is_copied()) model_.read_pieces(output, [&](const at::Tensor& piece) { write_values(writer, piece); });
        else write_values(writer, model_.merged(output));
        if (options_.progress) options_.progress(++done, std::ssize(model_.result().tensors));
      }
      writer.finish();
    }
    if (shards.size() == 1) return;
    format::Json index = format::Json::object();
    index["metadata"] = {{"total_parameters", parameters}, {"total_size", bytes}};
    index["weight_map"] = std::move(weight_map);
    files::write_file_atomically(files::path_in(folder, "model.safetensors.index.json"),
                                 format::dump_python_json(index, format::kConfigStyle) + "\n");
  }

  MergedModel model_;
  std::string adapter_folder_;
  const MergeOptions& options_;
};

}  // namespace

std::string_view to_string(MergeBase base) { return base == MergeBase::kOriginal ? "original" : "dequantized"; }

MergeBase parse_merge_base(std::string_view text) {
  for (const MergeBase base : {MergeBase::kOriginal, MergeBase::kDequantized}) {
    if (text == to_string(base)) return base;
  }
  throw ValueError(message("[merge] base must be original or dequantized; got '{}'.", text));
}

void merge_adapter(const std::string& model, const std::string& adapter, const std::string& output, const MergeOptions& options) {
  const at::NoGradGuard no_grad;
  QLORAPP_CHECK_VALUE(options.max_shard_size.count > 0, "[merge] max_shard_size must be above 0; got {}.",
                      options.max_shard_size.count);
  files::FreshFolder fresh(output);
  ops::mark_phase(ops::MemoryPhase::kMerge);
  Merger(model, adapter, options).write(fresh.path());
  fresh.keep();
}

}  // namespace qlorapp
