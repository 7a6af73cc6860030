// SPDX-License-Identifier: Apache-2.0
// Trainer, whose callbacks take the GIL for as long as Python runs.
#include <algorithm>
#include <array>
#include <chrono>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "core/check.hpp"
#include "format/config_json.hpp"
#include "io/checkpoint_folder.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/train/trainer.hpp"

namespace qlorapp::python {
namespace {

constexpr std::array<const char*, 10> kEventNames{"train_begin",        "epoch_begin",    "step_begin", "substep_end",
                                                  "pre_optimizer_step", "optimizer_step", "step_end",   "epoch_end",
                                                  "prediction_step",    "train_end"};

py::dict to_dict(const LogRecord& record) {
  py::dict result;
  for (const auto& [key, value] : record.values()) result[py::str(key)] = value;
  return result;
}

/// hooks: {"event": f(name, control), "log_evaluate_save": f(control), "rolled_back": f(folder), "stop_now": f()}; absent ones are not
/// called.
class Hooks {
 public:
  explicit Hooks(py::dict hooks)
      : hooks_(new py::dict(std::move(hooks)), [](const py::dict* held) {
          const py::gil_scoped_acquire gil;
          delete held;
        }) {}
  [[nodiscard]] bool has(const char* name) const { return hooks_->contains(name); }
  template <class... Arguments>
  py::object operator()(const char* name, Arguments&&... arguments) const {
    return (*hooks_)[name](std::forward<Arguments>(arguments)...);
  }

 private:
  std::shared_ptr<py::dict> hooks_;
};

py::object by_reference(TrainerControl& control) { return py::cast(&control, py::return_value_policy::reference); }

TrainerCallbacks callbacks_from(const py::dict& given) {
  const Hooks hooks(given);
  TrainerCallbacks callbacks;
  callbacks.poll = [] {
    const py::gil_scoped_acquire gil;
    rethrow_interrupt();
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  if (hooks.has("event")) {
    callbacks.on_event = [=](TrainerEvent event, const TrainState&, TrainerControl& control) {
      const py::gil_scoped_acquire gil;
      hooks("event", kEventNames[static_cast<size_t>(event)], by_reference(control));
    };
  }
  if (hooks.has("log_evaluate_save")) {
    callbacks.log_evaluate_save = [=](TrainerControl& control) {
      const py::gil_scoped_acquire gil;
      hooks("log_evaluate_save", by_reference(control));
    };
  }
  if (hooks.has("rolled_back")) {
    callbacks.on_rollback = [=](const std::string& folder) {
      const py::gil_scoped_acquire gil;
      hooks("rolled_back", folder);
    };
  }
  if (hooks.has("stop_now")) {
    callbacks.stop_now = [=] {
      const py::gil_scoped_acquire gil;
      return hooks("stop_now").cast<bool>();
    };
  }
  return callbacks;
}

using TokenRow = std::pair<std::vector<TokenId>, std::vector<TokenId>>;

/// @param row_lengths  of rows that are packs; empty, or one list for each row, empty for one that is not.
std::vector<Example> examples_from(std::vector<TokenRow> rows, std::vector<std::vector<int64_t>> row_lengths = {}) {
  QLORAPP_CHECK_VALUE(row_lengths.empty() || row_lengths.size() == rows.size(),
                      "[trainer] row_lengths must have one list for each of {} rows; got {}.", rows.size(), row_lengths.size());
  row_lengths.resize(rows.size());
  std::vector<Example> examples;
  for (auto& [input_ids, labels] : rows) {
    const size_t row = examples.size();
    examples.push_back({std::move(input_ids), std::move(labels), static_cast<int64_t>(row) + 1, std::move(row_lengths[row])});
  }
  return examples;
}

/// @param blank  the last tokens of rows that are white space.
void note_eos(std::vector<Example>& examples, const std::vector<int64_t>& eos, const std::vector<TokenId>& blank) {
  const std::vector<TokenId> ends(eos.begin(), eos.end());
  const auto is_blank = [&](TokenId id) { return std::find(blank.begin(), blank.end(), id) != blank.end(); };
  for (Example& example : examples) example.ends_in_eos = ends_in_trained_eos(example, ends, is_blank);
}

/// The trainer and the model that it refers to.
struct OwningTrainer {
  std::shared_ptr<CausalLM> model;
  Trainer trainer;
};

std::unique_ptr<OwningTrainer> make_trainer(const std::shared_ptr<CausalLM>& model, const std::string& arguments_json,
                                            std::vector<TokenRow> train_rows, std::vector<TokenRow> eval_rows,
                                            const std::string& base_model, const py::dict& hooks,
                                            std::vector<std::vector<int64_t>> row_lengths, const std::string& group,
                                            const std::vector<TokenId>& blank_tokens) {
  TrainingArguments arguments;
  format::from_json(format::parse_json(arguments_json, "TrainingArguments"), arguments, "TrainingArguments");
  TrainerCallbacks callbacks = callbacks_from(hooks);
  const py::gil_scoped_release no_gil;
  std::shared_ptr<Communicator> ranks = nullptr;
  const std::shared_ptr<Communicator>& shard_ranks = model->decoder().ranks();  // whose ranks the trainer uses then
  if (!group.empty() && !shard_ranks) ranks = communicator_over(group, model->device());
  Communicator* const all = shard_ranks ? shard_ranks.get() : ranks.get();
  if (all != nullptr) all->set_timeout(std::chrono::seconds{arguments.ddp_timeout});
  std::vector<Example> train_data = examples_from(std::move(train_rows), std::move(row_lengths));
  note_eos(train_data, model->config().eos_token_ids, blank_tokens);
  return reporting_failures(all, [&] {
    return std::unique_ptr<OwningTrainer>(
        new OwningTrainer{model, Trainer(*model, std::move(arguments), std::move(train_data), examples_from(std::move(eval_rows)),
                                         base_model, std::move(callbacks), ranks)});
  });
}

py::tuple train(OwningTrainer& self, const std::optional<std::string>& resume_from) {
  TrainOutput output;
  {
    const py::gil_scoped_release no_gil;
    output = self.trainer.train(resume_from);
  }
  return py::make_tuple(output.global_step, output.training_loss, to_dict(output.metrics), output.stopped);
}

/// State that changes from step to step, without the history, which has its own function.
py::dict state(const OwningTrainer& self) {
  const TrainState& run = self.trainer.state();
  py::dict result;
  result["epoch"] = self.trainer.epoch();
  result["global_step"] = run.global_step;
  result["max_steps"] = self.trainer.max_steps();
  result["num_train_epochs"] = self.trainer.epochs();
  result["num_input_tokens_seen"] = run.tokens_seen;
  result["total_flos"] = run.total_flos;
  result["best_metric"] = run.best_metric;
  result["best_global_step"] = run.best_global_step;
  result["best_model_checkpoint"] = run.best_model_checkpoint.empty() ? py::object(py::none()) : py::str(run.best_model_checkpoint);
  return result;
}

}  // namespace

void bind_trainer(py::module_& m) {
  py::class_<TrainerControl>(m, "TrainerControl", "What a callback may ask for.")
      .def(py::init<>())
      .def_readwrite("should_training_stop", &TrainerControl::should_training_stop)
      .def_readwrite("should_epoch_stop", &TrainerControl::should_epoch_stop)
      .def_readwrite("should_save", &TrainerControl::should_save)
      .def_readwrite("should_evaluate", &TrainerControl::should_evaluate)
      .def_readwrite("should_log", &TrainerControl::should_log);

  py::class_<OwningTrainer>(m, "Trainer", "include/qlorapp/train/trainer.hpp")
      .def(py::init(&make_trainer), py::arg("model"), py::arg("arguments_json"), py::arg("train_rows"), py::arg("eval_rows"),
           py::arg("base_model"), py::arg("hooks"), py::arg("row_lengths") = std::vector<std::vector<int64_t>>(),
           py::arg("group") = "", py::arg("blank_tokens") = std::vector<TokenId>(),
           "row_lengths: of training rows that are packs; include/qlorapp/data/dataset.hpp. group: the name of a process group of "
           "torch.distributed whose ranks train together. blank_tokens: last tokens of rows that are white space.")
      .def("train", &train, py::arg("resume_from") = std::nullopt,
           "(global_step, training_loss, metrics, whether a stop_now hook ended it)")
      .def_property_readonly(
          "resumed_with_changes", [](const OwningTrainer& self) { return self.trainer.resumed_with_changes(); },
          "Data or options differ from those of the checkpoint that train() resumed from.")
      .def("state", &state)
      .def(
          "use_folder", [](OwningTrainer& self, std::shared_ptr<RunFolder> folder) { self.trainer.use_folder(std::move(folder)); },
          py::arg("folder"), "train() belongs to the run of this locked folder, and leaves its report there.")
      .def(
          "arguments", [](const OwningTrainer& self) { return format::to_json(self.trainer.args()).dump(); },
          "JSON; memory_budget may have chosen some of them.")
      .def(
          "save_state", [](OwningTrainer& self, const std::string& folder) { self.trainer.save_state(folder); }, py::arg("folder"),
          NoGil(), "What train(resume_from) needs beside the adapter.")
      .def(
          "losses_since_log",
          [](const OwningTrainer& self) {
            const TrainState& run = self.trainer.state();
            return py::make_tuple(run.loss_since_log, run.steps_since_log, run.last_grad_norm, run.last_learning_rate);
          },
          "(their sum, how many, the last gradient norm and learning rate). Complete inside of log_evaluate_save and after "
          "train().")
      .def("forget_losses",
           [](OwningTrainer& self) {
             TrainState& run = self.trainer.state();
             run.loss_since_log = 0;
             run.steps_since_log = 0;
           })
      .def_property_readonly("learning_rate",
                             [](const OwningTrainer& self) {
                               const TrainState& run = self.trainer.state();
                               return run.schedule.learning_rate(run.base_learning_rate, run.optimizer.step_count());
                             })
      .def(
          "zero_grad", [](OwningTrainer& self) { self.trainer.state().arena->zero_grad(); },
          "Zeroes the gradients, and binds those that were set to None.");
}

}  // namespace qlorapp::python
