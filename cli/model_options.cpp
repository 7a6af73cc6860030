// SPDX-License-Identifier: Apache-2.0
#include "model_options.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "progress.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/folder.hpp"
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

TextTools TextTools::open(const std::string& folder) {
  QLORAPP_CHECK_FORMAT(format::exists(format::path_in(folder, "tokenizer.json")), "[tokenizer] ", folder,
                       " has no tokenizer.json. Copy it from the model's page, or give rows of input_ids and labels.");
  return {Tokenizer::from_folder(folder), ChatTemplate::from_folder(folder)};
}

void RowOptions::add_to(CommandLine& line) {
  line.option("data_format", data_format, "auto (by the file's name), json, csv, tsv, text (a line is a row) or paragraphs");
  line.option("dataset_text_field", dataset_text_field, "column of texts");
  line.option("prompt_column", prompt_column,
              "column of prompts, trained on only with --completion_only_loss false; default: detected");
  line.option("completion_column", completion_column, "column of completions; default: detected");
  line.option("messages_column", messages_column, "column of conversations; default: detected");
}

void RowOptions::apply_to(DatasetOptions& rows) const {
  rows.file_format = parse_file_format(data_format);
  rows.text_field = dataset_text_field;
  rows.prompt_field = prompt_column;
  rows.completion_field = completion_column;
  rows.messages_field = messages_column;
}

Dataset read_rows(const std::string& path, const DatasetOptions& options, const std::string& model_folder,
                  std::optional<TextTools>& tools) {
  if (!tools && format::exists(format::path_in(model_folder, "tokenizer.json"))) tools = TextTools::open(model_folder);
  std::vector<std::string> files = {path};
  if (path.find(',') != std::string::npos && !format::exists(path)) files = detail::split_at_commas(path);
  Dataset all;
  for (const std::string& file : files) {
    Dataset data = Dataset::read(file, options, tools && tools->tokenizer ? &*tools->tokenizer : nullptr,
                                 tools && tools->chat ? &*tools->chat : nullptr);
    log_info(concat(file, ": ", data.summary.line()));
    for (const std::string& warning : data.summary.warnings()) log_warning(warning);
    if (all.examples.empty()) all = std::move(data);
    else std::move(data.examples.begin(), data.examples.end(), std::back_inserter(all.examples));
  }
  return all;
}

at::ScalarType parse_dtype(const std::string& text) {
  if (text == "float32" || text == "fp32") return at::kFloat;
  if (text == "bfloat16" || text == "bf16") return at::kBFloat16;
  if (text == "float16" || text == "fp16") return at::kHalf;
  throw ValueError(concat("[dtype] must be float32, bfloat16 or float16; got '", text, "'."));
}

}  // namespace qlorapp::cli
