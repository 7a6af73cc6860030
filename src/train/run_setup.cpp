// SPDX-License-Identifier: Apache-2.0
#include "train/run_setup.hpp"

#include <ATen/Context.h>

#include <string>
#include <utility>

#include "core/check.hpp"
#include "format/config_json.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/plan_run.hpp"

namespace qlorapp {
namespace {

AdamW::Options optimizer_options(const TrainingArguments& args) {
  return {args.adam_beta1,
          args.adam_beta2,
          args.adam_epsilon,
          args.weight_decay,
          args.optimizer_is_8bit() ? AdamW::State::kEightBit : AdamW::State::kFloat32,
          args.optimizer_is_paged()};
}

/// torch's defaults, with a floor and an end: 17 skips in a row take the scale from 65536 below 1, where float16 has nothing left to gain.
GradScaler::Options scaler_options(at::Device device, bool computes_in_half, const TrainingArguments& args) {
  GradScaler::Options options;
  options.device = device.type();
  // On a GPU without bf16, bf16 is float16 (io/device.hpp) and needs what float16 needs.
  options.enabled = args.fp16 || (device.is_cuda() && computes_in_half);
  options.min_scale = 1.0;
  options.max_consecutive_skips = 17;
  return options;
}

}  // namespace

TrainState new_state(CausalLM& model, const TrainingArguments& args) {
  return {model.arena(), optimizer_options(args), scaler_options(model.device(), model.dtype() == at::kHalf, args)};
}

std::shared_ptr<Communicator> ranks_of_base(const CausalLM& model) {
  const std::shared_ptr<Communicator>& ranks = model.decoder().ranks();
  return ranks && ranks->whole() ? ranks->whole() : ranks;
}

void meet_ranks(Communicator& ranks, CausalLM& model, const TrainingArguments& args) {
  check_same_on_all(ranks, "version of qlorapp", QLORAPP_VERSION);
  TrainingArguments compared = args;
  compared.output_dir.clear();  // may be another path to the same folder
  compared.use_cpu = model.device().is_cpu();
  check_same_on_all(ranks, "options", format::to_json(compared).dump());
  check_same_on_all(ranks, "device type", c10::DeviceTypeName(model.device().type(), /*lower_case=*/true));
  check_same_on_all(ranks, "adapter layout", message("{}", model.arena().values().numel()));
  ranks.broadcast(model.arena().values(), 0).wait();
}

void take_options(TrainState& state, const TrainingArguments& args) {
  if (args.optimizer_is_paged() && state.arena->values().device().is_cpu()) {
    log_warning_once(message("[trainer] optim={}: on a CPU the optimizer state is not paged; results are the same.", args.optim));
  }
  if (args.tf32) at::globalContext().setAllowTF32CuBLAS(*args.tf32);
  state.schedule = make_schedule(args.lr_scheduler_type, args.lr_scheduler_kwargs.json);
  state.base_learning_rate = args.learning_rate;
  state.max_grad_norm = args.max_grad_norm;
  state.count_position_zero = args.count_position_zero;
  state.seed = static_cast<uint64_t>(args.seed);
  state.sums_in_bf16 = args.ddp_sum_in_bf16;
}

void set_up_model(CausalLM& model, TrainingArguments& args, const TrainState& state, int64_t longest_row, bool evaluates) {
  if (args.full_determinism) model.settings().set_deterministic(true);
  if (!args.fp8) {
    model.settings().set_float8(false);  // another run may have set it
  } else {
    const int64_t architecture = gpu_architecture(model.device());
    QLORAPP_CHECK_VALUE(architecture == 0 || architecture >= 89,
                        "[trainer] fp8=True needs a GPU that multiplies eight bits: sm_89 (L4, RTX 40), sm_90 (H100) or newer; "
                        "this one is sm_{}. Leave it out.",
                        architecture);
    model.settings().set_float8(true);
  }
  const bool has_budget = !args.memory_budget.empty();
  if (has_budget || args.auto_find_batch_size) {
    FittedArguments fitted = fit_arguments(model, args, longest_row, evaluates);
    args = std::move(fitted.args);
    log_info(fitted.text);
    if (state.ranks && state.ranks->size() > 1) {  // free memory differs from GPU to GPU: what fits rank 0's is for all
      const std::string chosen = text_of_first(*state.ranks, format::to_json(args).dump());
      const std::string own_folder = args.output_dir;
      format::from_json(format::parse_json(chosen, "TrainingArguments"), args, "TrainingArguments");
      args.output_dir = own_folder;
    }
  }
  // Settings that neither a budget nor the arguments set keep the model's values.
  StepSettings& settings = model.settings();
  if (has_budget || args.gradient_checkpointing) {
    settings.set_segments(parse_segments(args.keep_text(), std::ssize(model.blocks())));
  }
  if (has_budget || args.memory() != MemorySettings{}) settings.set_memory(args.memory_over(settings.memory()));
  if (args.embedding_on_host && model.config().tie_word_embeddings) {
    log_warning_once(
        "[trainer] embedding_on_host has no effect: this model's head is its embedding table, and the head stays on the GPU.");
  }
}

}  // namespace qlorapp
