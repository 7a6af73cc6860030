// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "format/model_folder.hpp"
#include "io/finite.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "io/tensor_stream.hpp"
#include "model_files.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/format/quantization_config.hpp"
#include "qlorapp/io/load_model.hpp"

namespace qlorapp {
void quantize_checkpoint(const std::string& folder, const std::string& output, const Quantizer::Options& options,
                         at::ScalarType compute_dtype, const std::function<void(int64_t, int64_t)>& progress) {
  files::FreshFolder fresh(output);
  const format::ModelFolder model = format::open_model_folder(folder);
  const format::ModelConfig& config = model.config;
  const format::TensorFiles& files = model.tensors;
  const auto linears = format::parameters(config, format::Role::kLinear);
  for (const auto& linear : linears) {
    QLORAPP_CHECK_VALUE(!format::is_quantized(files, linear.name()), "[quantize] {} is quantized already ({}). Use it as it is.",
                        folder, linear.module);
  }
  // Names and dtypes are known beforehand, the length of a quant_state is not: its offset is a decimal number. So the quantized
  // parts (a quarter of the model) are held; everything else is copied file to file when its turn comes.
  const Quantizer quantizer(options);
  NamedTensors quantized;
  int64_t done = 0;
  const auto total = static_cast<int64_t>(linears.size());
  std::vector<std::string> consumed;
  std::vector<StreamedTensor> streamed;
  for (const auto& linear : linears) {
    consumed.push_back(linear.name());
    const auto keep = [&, name = consumed.back()](const QuantizedTensor& weight) {
      for (auto& part : quantized_tensors(name, weight)) quantized.push_back(std::move(part));
      if (progress) progress(++done, total);
    };
    stream_and_quantize(streamed, files, consumed.back(), linear.shape, quantizer, keep);
  }
  stream_tensors(std::move(streamed), at::kCPU);
  std::sort(consumed.begin(), consumed.end());

  std::vector<format::TensorSpec> specs;
  std::map<std::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : quantized) {
    specs.push_back({name, format_dtype_of(tensor.scalar_type()), tensor.sizes().vec()});
    by_name[name] = &tensor;
  }
  for (const format::TensorLocation& location : files.tensors()) {
    const format::TensorEntry& entry = *location.tensor;
    if (std::binary_search(consumed.begin(), consumed.end(), entry.name)) continue;
    if (config.tie_word_embeddings && entry.name == format::kHeadTable) continue;
    specs.push_back({entry.name, entry.dtype, entry.shape});
  }

  format::SafetensorsWriter writer(files::path_in(fresh.path(), "model.safetensors"), std::move(specs), {{"format", "pt"}});
  for (const format::TensorEntry& entry : writer.tensors()) {
    const auto found = by_name.find(entry.name);
    const at::Tensor tensor = found != by_name.end() ? found->second->contiguous() : read_tensor(files.at(entry.name));
    if (found == by_name.end()) check_finite(tensor, folder, entry.name);
    if (tensor.numel() > 0) writer.write({static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
  }
  writer.finish();

  copy_model_files(folder, fresh.path());
  format::QuantizationConfig quantization;
  quantization.quant_type = options.quant_type;
  quantization.double_quant = options.double_quant;
  quantization.compute_dtype = format_dtype_of(compute_dtype);
  if (!model.other_parts.empty()) {  // they keep their precision, and readers are told so
    quantization.skip_modules = model.other_parts;
    quantization.skip_modules->emplace_back(format::kHeadModule);
  }
  const std::string config_path = files::path_in(folder, "config.json");
  // Last, because a folder without it is no model: an interrupted run leaves nothing that could be taken for one.
  files::write_file_atomically(files::path_in(fresh.path(), "config.json"),
                               format::with_quantization_config(format::with_tables_of(config, read_text(config_path), config_path),
                                                                config_path, quantization));
  fresh.keep();
}

}  // namespace qlorapp
