// SPDX-License-Identifier: Apache-2.0
/// The options of train, which init-config writes, too.
#pragma once

#include <cstdint>
#include <string>

#include "command_defaults.hpp"
#include "command_line.hpp"
#include "model_options.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "reports.hpp"

namespace qlorapp::cli {

struct TrainOptions {
  ModelOptions model;
  RowOptions rows;
  std::string data, output, eval_data, init_adapter;
  ReportOptions reports;
  bool dry_run = false;
  TrainingArguments args;
  LoraConfig lora;
  CommandDefaults defaults;
  Launch launch;       ///< Which of several processes this is.
  int64_t shards = 1;  ///< Processes that the base would be sharded over.
};

void add_train_options(CommandLine& line, TrainOptions& options);

}  // namespace qlorapp::cli
