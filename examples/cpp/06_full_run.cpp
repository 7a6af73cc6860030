// SPDX-License-Identifier: Apache-2.0
/// A model folder in, a PEFT adapter out, with every part in sight: example_06_full_run MODEL_FOLDER OUTPUT_FOLDER
#include <ATen/ATen.h>

#include <cstdio>
#include <string>
#include <vector>

#include "qlorapp/data/collate.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/train/evaluate.hpp"
#include "qlorapp/train/step.hpp"

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: %s MODEL_FOLDER OUTPUT_FOLDER\n", argv[0]), 2;
  const std::string folder = argv[1], output = argv[2];
  qlorapp::CausalLM model = qlorapp::load_model(folder, {});  // linear layers in NF4 with double quantization, the rest in float32
  qlorapp::LoraConfig lora;
  lora.r = 8;
  lora.lora_alpha = 16;
  lora.target_modules = std::string("all-linear");
  model.add_adapters(lora, /*seed=*/0);

  // Eight rows to learn by heart; real ones come from Dataset::read and a Tokenizer.
  at::manual_seed(0);
  std::vector<qlorapp::Example> rows;
  for (int64_t length = 9; length < 17; ++length) {
    const at::Tensor ids = at::randint(model.config().vocab_size, {length}, at::kInt);
    const std::vector<qlorapp::TokenId> tokens(ids.const_data_ptr<int>(), ids.const_data_ptr<int>() + length);
    rows.push_back({.input_ids = tokens, .labels = tokens});
  }
  const std::span all(rows);
  const std::vector<qlorapp::Batch> window{collate(all.first(4)), collate(all.last(4))};  // two micro-batches an optimizer step

  qlorapp::TrainState run(model.arena(), {}, {.device = at::kCPU, .enabled = false});  // AdamW; no loss scaling in float32
  run.base_learning_rate = 5e-3;
  run.max_grad_norm = 1.0;
  run.schedule = {.type = qlorapp::ScheduleType::kLinear, .training_steps = 40};
  for (int step = 0; step < 40; ++step) {
    const qlorapp::StepReport report = qlorapp::train_step(model, run, window);
    if (step % 10 == 0) {
      std::printf("step %2d  loss %.3f  gradient norm %.3f\n", step, report.mean_loss.item<double>(),
                  report.grad_norm.item<double>());
    }
  }
  const double trained = evaluate(model, rows, {}).token_weighted;
  save_adapter(model, output, folder);

  qlorapp::CausalLM again = qlorapp::load_model(folder, {});
  const double before = evaluate(again, rows, {}).token_weighted;
  load_adapter(again, output);
  const double loaded = evaluate(again, rows, {}).token_weighted;
  std::printf("loss %.3f before, %.3f after, %.3f from %s\n", before, trained, loaded, output.c_str());
  return trained < 0.5 * before && loaded == trained ? 0 : 1;
}
