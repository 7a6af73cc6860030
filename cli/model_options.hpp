// SPDX-License-Identifier: Apache-2.0
/// Options that several commands share: which model, in which dtype, with which template, over which rows.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "command_line.hpp"
#include "folder_text.hpp"
#include "hub.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/format/bits_and_bytes_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/compute_dtype.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/memory_settings.hpp"

namespace qlorapp::cli {

struct ModelOptions {
  std::string model, chat_template;
  std::string quant_type = "nf4";
  std::string device = "auto";
  std::string dtype = "auto";
  std::string requantize, revision;
  bool double_quant = true;
  int64_t block_size = 64;
  format::BitsAndBytesConfig bnb;  ///< Its options that are not above.

  ModelOptions() { bnb.load_in_4bit = true; }

  /// The folder, how it is quantized, and the device.
  void add_to(CommandLine& line);
  /// add_to(), and how it is loaded: dtype, load_in_4bit.
  void add_loading_to(CommandLine& line);
  /// After parse(): a name on the Hub becomes the folder of its snapshot, and a GGUF file the one that stands for it.
  /// @throws ValueError naming the option; as hub_folder and model_folder.
  void open();

  /// @throws FormatError and IoError as format::settled_config.
  [[nodiscard]] format::ModelConfig config() const;
  /// --chat_template, for commands that read conversations.
  void add_template_to(CommandLine& line);
  /// @param adapter  a folder whose tokenizer and template are used if it has them; empty: none. @throws IoError as finish_update.
  [[nodiscard]] FolderText text_tools(const std::string& adapter = "") const;
  [[nodiscard]] Quantizer::Options quantization() const;
  /// --dtype. Nothing for auto.
  [[nodiscard]] std::optional<at::ScalarType> requested_dtype() const;
  /// The dtype that the model computes in on --device.
  [[nodiscard]] ComputeDtype choose_dtype(const format::ModelConfig& config) const;
  /// Whether a GGUF file's blocks are the weights.
  [[nodiscard]] bool keeps_blocks() const { return requantize.empty() && bnb.load_in_4bit; }
  /// "NF4 with double quantization, blocks of 64 …": how the linear layers are stored, and where the defaults are not BitsAndBytesConfig's.
  [[nodiscard]] std::string storage_text(const CommandLine& line, const format::ModelConfig& config) const;
  /// For a plan of what load() takes.
  [[nodiscard]] PlanSettings plan_settings(const format::ModelConfig& config, at::ScalarType compute_dtype) const;
  /// Loads with a progress line on a terminal.
  /// @param memory  says which weights go to the host.  @param shard_over  as in WeightOptions.
  [[nodiscard]] CausalLM load(at::ScalarType compute_dtype, const MemorySettings& memory = {},
                              std::shared_ptr<Communicator> shard_over = nullptr) const;
};

/// How files of rows are read and which of their columns are what: of each command with --data.
struct RowOptions {
  std::string data_format = "auto";
  std::string dataset_text_field = "text";
  std::string prompt_column, completion_column, messages_column;

  void add_to(CommandLine& line);
  void apply_to(DatasetOptions& rows) const;
};

/// The files of one name, or of several separated by commas; as row_files().
[[nodiscard]] std::vector<std::string> row_files_of(const std::string& path, Split split);

/// Reads rows, logs their summary and warnings, and where options.prefer_assistant_only fails reads whole rows. Rows of input_ids need neither tokenizer nor template.
/// @param path  one file, or several separated by commas, which may differ in format. The summary returned is the first one's.
/// @param split  that is read of a dataset on the hub.
[[nodiscard]] Dataset read_rows(const std::string& path, const DatasetOptions& options, FolderText& tools, Split split);

/// --requantize. check_requantize() throws ValueError for another type than nf4 or fp4, and for a model that is no GGUF file.
void add_requantize_to(CommandLine& line, std::string& requantize);
void check_requantize(const std::string& requantize, const std::string& model);

/// The adapter's config, as loading it has it. @throws as open_adapter (io/adapter_file.hpp).
[[nodiscard]] LoraConfig lora_of_adapter(const std::string& folder);

/// @throws ValueError for a folder that holds the other of the two, with what to give in its place.
void check_model_folder(const std::string& model);
/// @param option  its name: "adapter". @param adapter  empty: none is given.
void check_adapter_folder(std::string_view option, const std::string& adapter);

/// "float32", "bfloat16", "float16", their short forms and torch's ("torch.float32"). @throws ValueError with the list.
[[nodiscard]] at::ScalarType parse_dtype(const std::string& given);

}  // namespace qlorapp::cli
