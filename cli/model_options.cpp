// SPDX-License-Identifier: Apache-2.0
#include "model_options.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "files/folder_update.hpp"
#include "format/model_folder.hpp"
#include "hub.hpp"
#include "io/adapter_file.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/gguf.hpp"
#include "qlorapp/train/plan_run.hpp"

namespace qlorapp::cli {

void add_requantize_to(CommandLine& line, std::string& requantize) {
  line.option("requantize", requantize, "nf4 or fp4: a GGUF file's weights are quantized anew; unset: they stay in its blocks");
}

void check_requantize(const std::string& requantize, const std::string& model) {
  QLORAPP_CHECK_VALUE(requantize.empty() || requantize == "nf4" || requantize == "fp4",
                      "[requantize] must be nf4 or fp4; got '{}'.", requantize);
  QLORAPP_CHECK_VALUE(requantize.empty() || is_gguf_file(model), "[requantize] is for a GGUF file; --model is {}. Leave it out.",
                      model);
}

void check_model_folder(const std::string& model) {
  const auto holds = [&](const char* file) { return files::exists(files::path_in(model, file)); };
  if (holds("config.json") || !holds("adapter_config.json")) return;
  std::string base;
  try {
    base = format::load_adapter_config(model).base_model_name_or_path.value_or("");
  } catch (const Error&) {  // a damaged one is an adapter, too
  }
  throw ValueError(
      message("[model] {} holds an adapter, not a model{}. Give its base as --model, and the adapter as --adapter (train: "
              "--init_adapter).",
              model, base.empty() ? std::string() : message("; its base is {}", base)));
}

void check_adapter_folder(std::string_view option, const std::string& adapter) {
  const auto holds = [&](const char* file) { return files::exists(files::path_in(adapter, file)); };
  QLORAPP_CHECK_VALUE(adapter.empty() || holds("adapter_config.json") || !holds("config.json"),
                      "[{}] {} holds a model, not an adapter. Give it as --model, and the folder that train wrote as --{}.", option,
                      adapter, option);
}

void ModelOptions::add_to(CommandLine& line) {
  line.option("model", model, "folder of a Hugging Face checkpoint, a name on the Hub, or a GGUF file", /*required=*/true);
  line.option("revision", revision, "of a name on the Hub: branch, tag or commit");
  line.option("quant_type", quant_type, "nf4 or fp4: how the linear layers are stored");
  line.option("double_quant", double_quant, "store the scales in eight bits too");
  line.option("block_size", block_size, "weights per scale: 32, 64 … 4096");
  line.option("device", device, "auto (a GPU if present), cpu, cuda or cuda:<number>");
  line.alias("bnb_4bit_quant_type", "quant_type");
  line.alias("bnb_4bit_use_double_quant", "double_quant");
}

void ModelOptions::add_loading_to(CommandLine& line) {
  add_to(line);
  add_requantize_to(line, requantize);
  line.option("dtype", dtype, "compute dtype: float32, bfloat16, float16, or auto (the checkpoint's)");
  line.alias("bnb_4bit_compute_dtype", "dtype");
  line.fields(bnb);
  line.unused(unused_quantization_options());
}

void ModelOptions::open() {
  bnb.validate();
  static_cast<void>(quantization());
  static_cast<void>(requested_dtype());
  if (!requantize.empty()) quant_type = requantize;
  if (is_hub_name(model)) {
    const std::string name = model;
    model = hub_folder(name, "model", revision);
    set_model_path(model, name);
  }
  check_model_folder(model);
  check_requantize(requantize, model);
  model = model_folder(model);
}

format::ModelConfig ModelOptions::config() const { return format::settled_config(model); }

void ModelOptions::add_template_to(CommandLine& line) {
  line.option("chat_template", chat_template,
              message("chat template to use instead of the model's: a .jinja file, or one of {}", joined(ChatTemplate::names())));
}

FolderText ModelOptions::text_tools(const std::string& adapter) const {
  if (adapter.empty()) return {model, model, chat_template};
  files::finish_update(adapter, kAdapterConfig);
  if (TextFiles::has_tokenizer(adapter)) return {adapter, model, chat_template};
  if (!chat_template.empty() || !files::has_entry(adapter, "chat_template.jinja")) return {model, model, chat_template};
  const std::string own = files::path_in(adapter, "chat_template.jinja");
  static_cast<void>(files::FileReader::open_inside(own));  // refuses a link: what a user names by --chat_template may be one
  return {model, model, own};
}

Quantizer::Options ModelOptions::quantization() const {
  QLORAPP_CHECK_VALUE(quant_type == "nf4" || quant_type == "fp4", "[quant_type] must be nf4 or fp4; got '{}'.", quant_type);
  Quantizer::Options options;
  options.quant_type = quant_type == "nf4" ? QuantType::kNf4 : QuantType::kFp4;
  options.double_quant = double_quant;
  options.block_size = block_size;
  return options;
}

std::optional<at::ScalarType> ModelOptions::requested_dtype() const {
  return dtype == "auto" ? std::nullopt : std::optional(parse_dtype(dtype));
}

ComputeDtype ModelOptions::choose_dtype(const format::ModelConfig& config) const {
  const at::Device on = parse_device(device);
  return choose_compute_dtype(requested_dtype(), config.dtype, on.type(), gpu_architecture(on));
}

std::string ModelOptions::storage_text(const CommandLine& line, const format::ModelConfig& config) const {
  if (config.quantization) return "four bits, as the checkpoint stores them";
  if (!config.blocks.empty() && keeps_blocks()) return "blocks as the GGUF file stores them";
  if (!bnb.load_in_4bit) return "not quantized (--load_in_4bit false)";
  std::string text = message("{}{} double quantization", quant_type == "nf4" ? "NF4" : "FP4", double_quant ? " with" : " without");
  const format::BitsAndBytesConfig theirs;
  std::string other;
  if (quant_type != theirs.bnb_4bit_quant_type && !line.given("quant_type")) other = " --quant_type " + theirs.bnb_4bit_quant_type;
  if (double_quant != theirs.bnb_4bit_use_double_quant && !line.given("double_quant")) other += " --double_quant false";
  if (!other.empty()) text += message(" (the defaults of BitsAndBytesConfig are{})", other);
  return text;
}

PlanSettings ModelOptions::plan_settings(const format::ModelConfig& config, at::ScalarType compute_dtype) const {
  PlanSettings settings;
  settings.model = config;
  settings.load_in_4bit = bnb.load_in_4bit;
  if (bnb.llm_int8_skip_modules) settings.skip_modules = *bnb.llm_int8_skip_modules;
  settings.quantization = quantization();
  settings.keep_blocks = keeps_blocks();
  settings.compute_dtype = compute_dtype;
  settings.device = planned_device(parse_device(device));
  return settings;
}

LoraConfig lora_of_adapter(const std::string& folder) { return open_adapter(folder).lora; }

CausalLM ModelOptions::load(at::ScalarType compute_dtype, const MemorySettings& memory,
                            std::shared_ptr<Communicator> shard_over) const {
  LoadOptions options;
  options.device = parse_device(device);
  options.compute_dtype = compute_dtype;
  options.load_in_4bit = bnb.load_in_4bit;
  if (bnb.llm_int8_skip_modules) options.skip_modules = *bnb.llm_int8_skip_modules;
  options.quantization = quantization();
  options.keep_blocks = keeps_blocks();
  options.embedding_on_host = memory.embedding_on_host;
  options.base_on_host = memory.base_on_host;
  options.shard_over = std::move(shard_over);
  ProgressBar bar("loading");
  options.progress = [&](int64_t done, int64_t total) { bar.update(done, total); };
  return load_model(model, options);
}

void RowOptions::add_to(CommandLine& line) {
  line.option("data_format", data_format, "auto (by the file's name), json, csv, tsv, text (one row per line) or paragraphs");
  line.option("dataset_text_field", dataset_text_field, "column of texts");
  line.alias("text_column", "dataset_text_field");
  line.option("prompt_column", prompt_column, "column of prompts; unset: detected");
  line.option("completion_column", completion_column, "column of completions; unset: detected");
  line.option("messages_column", messages_column, "column of conversations; unset: detected");
}

void RowOptions::apply_to(DatasetOptions& rows) const {
  rows.file_format = parse_file_format(data_format);
  rows.text_field = dataset_text_field;
  rows.prompt_field = prompt_column;
  rows.completion_field = completion_column;
  rows.messages_field = messages_column;
}

namespace {

/// Where turns were preferred and cannot be found, whole rows.
Dataset read_file(const std::string& file, const DatasetOptions& options, FolderText& tools) {
  if (!options.prefer_assistant_only) return Dataset::read(file, options, tools);
  try {
    return Dataset::read(file, options, tools);
  } catch (const FormatError& error) {
    DatasetOptions whole = options;
    whole.prefer_assistant_only = false;
    Dataset data = Dataset::read(file, whole, tools);  // or what is wrong with the file itself
    log_warning(
        message("{}: whole rows are trained, prompts too, because the assistant's turns cannot be found: {}", file, error.what()));
    return data;
  }
}

}  // namespace

std::vector<std::string> row_files_of(const std::string& path, Split split) {
  std::vector<std::string> names = {path}, found;
  if (path.find(',') != std::string::npos && !files::exists(path)) names = detail::split_at_commas(path);
  for (const std::string& name : names) {
    for (std::string& file : row_files(name, split)) found.push_back(std::move(file));
  }
  return found;
}

Dataset read_rows(const std::string& path, const DatasetOptions& options, FolderText& tools, Split split) {
  Dataset all;
  int64_t rows = 0;
  for (const std::string& file : row_files_of(path, split)) {
    Dataset data = read_file(file, options, tools);
    remove_made(file);
    log_info(message("{}: {}", file, data.summary.line()));
    for (const std::string& warning : data.summary.warnings()) log_warning(warning);
    for (Example& example : data.examples) example.row += rows;
    rows += data.summary.rows;
    if (all.examples.empty()) all = std::move(data);
    else std::move(data.examples.begin(), data.examples.end(), std::back_inserter(all.examples));
  }
  return all;
}

at::ScalarType parse_dtype(const std::string& given) {
  const std::string text = given.starts_with("torch.") ? given.substr(6) : given;
  if (text == "float32" || text == "fp32") return at::kFloat;
  if (text == "bfloat16" || text == "bf16") return at::kBFloat16;
  if (text == "float16" || text == "fp16") return at::kHalf;
  throw ValueError(message("[dtype] must be float32, bfloat16 or float16; got '{}'.", given));
}

}  // namespace qlorapp::cli
