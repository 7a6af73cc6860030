// SPDX-License-Identifier: Apache-2.0
/// The five classes, inject() for modules that have them, and the training step. Models, data and the Trainer have headers of their own:
///
///     io/load_model.hpp      a Hugging Face folder becomes a CausalLM
///     data/dataset.hpp       a file of rows becomes tokens and labels
///     train/trainer.hpp      epochs, logs, evaluation and checkpoints around the step
///     memory/planner.hpp     the memory of a run, before it begins
///     io/adapter.hpp         PEFT folders; io/merge.hpp writes base and adapter as one model
#pragma once

#include "qlorapp/adapters/adopt_parameters.hpp"
#include "qlorapp/nn/checkpointed_block.hpp"
#include "qlorapp/nn/inject.hpp"
#include "qlorapp/nn/lora_linear.hpp"
#include "qlorapp/nn/lora_linear_module.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "qlorapp/train/accumulator.hpp"
#include "qlorapp/train/grad_scaler.hpp"
#include "qlorapp/train/step.hpp"
