// SPDX-License-Identifier: Apache-2.0
#include "model_options.hpp"

#include "progress.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/device.hpp"

namespace qlorapp::cli {

void ModelOptions::add_to(CommandLine& line) {
  line.option("model", model, "folder of a Hugging Face checkpoint", /*required=*/true);
  line.option("quant_type", quant_type, "nf4 or fp4");
  line.option("double_quant", double_quant, "store the scales in eight bits too");
  line.option("block_size", block_size, "weights a scale: 32, 64 … 4096");
  line.option("device", device, "auto (a GPU if there is one), cpu, cuda or cuda:<number>");
}

void ModelOptions::add_template_to(CommandLine& line) {
  line.option("chat_template", chat_template,
              concat("of conversations, in place of the model's own: a .jinja file, or one of ", ChatTemplate::names()));
}

Quantizer::Options ModelOptions::quantization() const {
  QLORAPP_CHECK_VALUE(quant_type == "nf4" || quant_type == "fp4", "[quant_type] must be nf4 or fp4; got '", quant_type, "'.");
  Quantizer::Options options;
  options.quant_type = quant_type == "nf4" ? QuantType::kNf4 : QuantType::kFp4;
  options.double_quant = double_quant;
  options.block_size = block_size;
  return options;
}

CausalLM ModelOptions::load(at::ScalarType compute_dtype, bool embedding_on_host) const {
  LoadOptions options;
  options.device = parse_device(device);
  options.compute_dtype = compute_dtype;
  options.load_in_4bit = load_in_4bit;
  options.quantization = quantization();
  options.embedding_on_host = embedding_on_host;
  ProgressBar bar("loading");
  options.progress = [&](int64_t done, int64_t total) { bar.update(done, total); };
  return load_model(model, options);
}

Dataset read_rows(const std::string& path, const DatasetOptions& options, FolderText& tools) {
  Dataset data = Dataset::read(path, options, tools);
  log_info(concat(path, ": ", data.summary.line()));
  for (const std::string& warning : data.summary.warnings()) log_warning(warning);
  return data;
}

at::ScalarType parse_dtype(const std::string& text) {
  if (text == "float32" || text == "fp32") return at::kFloat;
  if (text == "bfloat16" || text == "bf16") return at::kBFloat16;
  if (text == "float16" || text == "fp16") return at::kHalf;
  throw ValueError(concat("[dtype] must be float32, bfloat16 or float16; got '", text, "'."));
}

}  // namespace qlorapp::cli
