// SPDX-License-Identifier: Apache-2.0
// Trainer, whose callbacks take the GIL for as long as Python runs.
#include <array>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/data/sampler.hpp"
#include "qlorapp/format/config_json.hpp"
#include "qlorapp/io/checkpoint_folder.hpp"
#include "qlorapp/train/clip.hpp"
#include "qlorapp/train/plan_run.hpp"
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

LogRecord to_record(const py::dict& dict) {
  LogRecord record;
  for (const auto& [key, value] : dict) {
    const auto name = key.cast<std::string>();
    if (py::isinstance<py::bool_>(value) || py::isinstance<py::int_>(value)) {
      record.set(name, value.cast<int64_t>());
    } else if (py::isinstance<py::float_>(value)) {
      record.set(name, value.cast<double>());
    } else if (py::isinstance<py::str>(value)) {
      record.set(name, value.cast<std::string>());
    } else {
      throw TypeError(
          concat("[log] '", name, "' must be a number or a string; got ", std::string(py::str(py::type::of(value))), "."));
    }
  }
  return record;
}

/// hooks: {"event": f(name, control), "log": …}: what is absent is not called.
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
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  if (hooks.has("event")) {
    callbacks.on_event = [=](TrainerEvent event, const TrainState&, TrainerControl& control) {
      const py::gil_scoped_acquire gil;
      hooks("event", kEventNames[static_cast<size_t>(event)], by_reference(control));
    };
  }
  if (hooks.has("save")) {
    callbacks.on_save = [=](const std::string& folder, TrainerControl& control) {
      const py::gil_scoped_acquire gil;
      hooks("save", folder, by_reference(control));
    };
  }
  if (hooks.has("log")) {
    callbacks.log = [=](const LogRecord& record, bool training, double start) {
      const py::gil_scoped_acquire gil;
      hooks("log", to_dict(record), training, start);
    };
  }
  if (hooks.has("evaluate")) {
    callbacks.evaluate = [=] {
      const py::gil_scoped_acquire gil;
      return to_record(hooks("evaluate").cast<py::dict>());
    };
  }
  if (hooks.has("log_evaluate_save")) {
    callbacks.log_evaluate_save = [=](TrainerControl& control) {
      const py::gil_scoped_acquire gil;
      hooks("log_evaluate_save", by_reference(control));
    };
  }
  if (hooks.has("step")) {
    callbacks.step = [=](const Window& window) {
      const py::gil_scoped_acquire gil;
      const auto [loss, norm, rate, targets, inputs, stepped] =
          hooks("step", window.epoch, window.first_batch, window.batches, window.rows)
              .cast<std::tuple<at::Tensor, at::Tensor, double, int64_t, int64_t, bool>>();
      return StepReport{loss, norm, rate, targets, inputs, stepped};
    };
  }
  for (const auto& [name, into] : {std::pair{"save_more", &callbacks.save_more}, std::pair{"load_more", &callbacks.load_more}}) {
    if (!hooks.has(name)) continue;
    *into = [hooks, name = name](const std::string& folder) {
      const py::gil_scoped_acquire gil;
      hooks(name, folder);
    };
  }
  if (hooks.has("callback_states")) {
    callbacks.callback_states = [=] {
      const py::gil_scoped_acquire gil;
      return hooks("callback_states").cast<std::string>();
    };
  }
  return callbacks;
}

using Row = std::pair<std::vector<TokenId>, std::vector<TokenId>>;

/// @param row_lengths  of rows that are packs; empty, or one list for each row, empty for one that is not.
std::vector<Example> examples_from(std::vector<Row> rows, std::vector<std::vector<int64_t>> row_lengths = {}) {
  QLORAPP_CHECK_VALUE(row_lengths.empty() || row_lengths.size() == rows.size(), "[trainer] row_lengths must have one list for each of ",
                      rows.size(), " rows; got ", row_lengths.size(), '.');
  row_lengths.resize(rows.size());
  std::vector<Example> examples;
  for (auto& [input_ids, labels] : rows) {
    const size_t row = examples.size();
    examples.push_back({std::move(input_ids), std::move(labels), static_cast<int64_t>(row) + 1, std::move(row_lengths[row])});
  }
  return examples;
}

/// The trainer and what it refers to: a model, or the arena of a foreign one.
struct OwningTrainer {
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<AdapterArena> arena;
  Trainer trainer;
};

std::unique_ptr<OwningTrainer> make_trainer(const std::shared_ptr<CausalLM>& model, const std::string& arguments_json,
                                            std::vector<Row> train_rows, std::vector<Row> eval_rows, const std::string& base_model,
                                            const py::dict& hooks, std::vector<std::vector<int64_t>> row_lengths) {
  TrainingArguments arguments;
  format::from_json(format::parse_json(arguments_json, "TrainingArguments"), arguments, "TrainingArguments");
  TrainerCallbacks callbacks = callbacks_from(hooks);
  const py::gil_scoped_release no_gil;
  return std::unique_ptr<OwningTrainer>(
      new OwningTrainer{model, nullptr,
                        Trainer(*model, std::move(arguments), examples_from(std::move(train_rows), std::move(row_lengths)),
                                examples_from(std::move(eval_rows)), base_model, std::move(callbacks))});
}

/// An arena that takes over the memory of `parameters`, whose values it keeps.
std::unique_ptr<AdapterArena> arena_of(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  QLORAPP_CHECK_VALUE(!parameters.empty(),
                      "[trainer] nothing of the model is trainable. Add adapters: get_peft_model(model, LoraConfig()).");
  const at::Device device = parameters.front().second.device();
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  for (const auto& [name, parameter] : parameters) {
    QLORAPP_CHECK_VALUE(
        parameter.scalar_type() == at::kFloat && parameter.device() == device,
        "[trainer] what is trained must be float32 on one device; '", name, "' is ", at::toString(parameter.scalar_type()), " on ",
        parameter.device().str(),
        ". get_peft_model makes float32 adapters unless autocast_adapter_dtype=False; load the model with device_map={'': 0}.");
    shapes.emplace_back(name, parameter.sizes().vec());
  }
  auto arena = std::make_unique<AdapterArena>(std::move(shapes), device);
  for (int64_t i = 0; i < arena->size(); ++i) {
    at::Tensor parameter = parameters[static_cast<size_t>(i)].second;
    const at::Tensor slice = arena->parameter(i).detach();
    slice.copy_(parameter.detach());
    parameter.set_data(slice);
    arena->adopt_parameter(i, parameter);
  }
  return arena;
}

std::unique_ptr<OwningTrainer> make_foreign_trainer(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                                    const std::string& arguments_json, int64_t parameter_count,
                                                    uint64_t fingerprint, bool computes_in_half, const py::dict& given) {
  TrainingArguments arguments;
  format::from_json(format::parse_json(arguments_json, "TrainingArguments"), arguments, "TrainingArguments");
  const Hooks hooks(given);
  const auto files = [&](const char* name) {
    return [hooks, name](const std::string& folder) {
      const py::gil_scoped_acquire gil;
      hooks(name, folder);
    };
  };
  std::unique_ptr<AdapterArena> arena = arena_of(parameters);
  ForeignModel model{arena.get(), computes_in_half, parameter_count, fingerprint, files("save_adapter"), files("load_adapter")};
  return std::unique_ptr<OwningTrainer>(
      new OwningTrainer{nullptr, std::move(arena), Trainer(std::move(model), std::move(arguments), callbacks_from(given))});
}

py::tuple train(OwningTrainer& self, const std::optional<std::string>& resume_from) {
  TrainOutput output;
  {
    const py::gil_scoped_release no_gil;
    output = self.trainer.train(resume_from);
  }
  return py::make_tuple(output.global_step, output.training_loss, to_dict(output.metrics));
}

/// @param rows  None: those that the trainer was given.
py::dict metrics_of(OwningTrainer& self, std::optional<std::vector<Row>> rows, const std::string& prefix) {
  LogRecord metrics;
  {
    const py::gil_scoped_release no_gil;
    metrics = rows ? self.trainer.metrics_of(examples_from(*std::move(rows)), prefix)
                   : self.trainer.metrics_of(self.trainer.eval_data(), prefix);
  }
  return to_dict(metrics);
}

/// What changes from step to step; the history is asked for by itself.
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

py::list log_history(const OwningTrainer& self) {
  py::list history;
  for (const LogRecord& record : self.trainer.state().log_history) history.append(to_dict(record));
  return history;
}

}  // namespace

void bind_trainer(py::module_& m) {
  m.def("latest_checkpoint", &latest_checkpoint, py::arg("output_dir"), "The newest whole checkpoint folder, or None.");
  py::class_<TrainerControl>(m, "TrainerControl", "What a callback may ask for.")
      .def(py::init<>())
      .def_readwrite("should_training_stop", &TrainerControl::should_training_stop)
      .def_readwrite("should_epoch_stop", &TrainerControl::should_epoch_stop)
      .def_readwrite("should_save", &TrainerControl::should_save)
      .def_readwrite("should_evaluate", &TrainerControl::should_evaluate)
      .def_readwrite("should_log", &TrainerControl::should_log);

  m.def(
      "epoch_order",
      [](int64_t rows, int64_t epoch, const std::string& strategy, int64_t seed, int64_t group_size, std::vector<int64_t> lengths) {
        return epoch_order(rows, epoch, {sampling_strategy(strategy), seed, group_size, std::move(lengths)});
      },
      py::arg("rows"), py::arg("epoch"), py::arg("strategy"), py::arg("seed"), py::arg("group_size"), py::arg("lengths"),
      "The order in which an epoch visits its rows; include/qlorapp/data/sampler.hpp.");

  py::class_<OwningTrainer>(m, "Trainer", "include/qlorapp/train/trainer.hpp")
      .def(py::init(&make_trainer), py::arg("model"), py::arg("arguments_json"), py::arg("train_rows"), py::arg("eval_rows"),
           py::arg("base_model"), py::arg("hooks"), py::arg("row_lengths") = std::vector<std::vector<int64_t>>(),
           "row_lengths: of training rows that are packs; include/qlorapp/data/dataset.hpp.")
      .def(py::init(&make_foreign_trainer), py::arg("parameters"), py::arg("arguments_json"), py::arg("parameter_count"),
           py::arg("fingerprint"), py::arg("computes_in_half"), py::arg("hooks"),
           "Around a model that Python computes: include/qlorapp/train/foreign_model.hpp.")
      .def("train", &train, py::arg("resume_from") = std::nullopt, "(global_step, training_loss, metrics)")
      .def(
          "use_own_batches", [](OwningTrainer& self, int64_t batches) { self.trainer.use_own_batches(batches); },
          py::arg("batches_per_epoch"))
      .def("metrics_of", &metrics_of, py::arg("rows"), py::arg("prefix"), "Loss and speed over rows; neither logged nor reported.")
      .def(
          "append_log", [](OwningTrainer& self, const py::dict& record) { self.trainer.append_log(to_record(record)); },
          py::arg("record"))
      .def_property_readonly(
          "control", [](OwningTrainer& self) { return &self.trainer.control(); }, py::return_value_policy::reference_internal)
      .def("state", &state)
      .def(
          "arguments", [](const OwningTrainer& self) { return format::to_json(self.trainer.args()).dump(); },
          "JSON; memory_budget may have chosen some of them.")
      .def("log_history", &log_history)
      .def(
          "save_model", [](const OwningTrainer& self, const std::string& folder) { self.trainer.save_model(folder); },
          py::arg("folder"), NoGil())
      .def(
          "write_trainer_state",
          [](const OwningTrainer& self, const std::string& folder) { self.trainer.write_trainer_state(folder); }, py::arg("folder"),
          NoGil())
      .def(
          "save_state", [](OwningTrainer& self, const std::string& folder) { self.trainer.save_state(folder); }, py::arg("folder"),
          NoGil(), "What train(resume_from) needs beside the adapter.")
      .def(
          "losses_since_log",
          [](const OwningTrainer& self) {
            const TrainState& run = self.trainer.state();
            return py::make_tuple(run.loss_since_log, run.steps_since_log, run.last_grad_norm, run.last_learning_rate);
          },
          "(their sum, how many, the last gradient norm and learning rate). Complete inside of log_evaluate_save and after train().")
      .def("forget_losses",
           [](OwningTrainer& self) {
             TrainState& run = self.trainer.state();
             run.loss_since_log = 0;
             run.steps_since_log = 0;
           })
      .def(
          "save_checkpoint", [](OwningTrainer& self) { self.trainer.save_checkpoint(); }, NoGil())

      // The parts of a step, for one that Python computes.
      .def_property_readonly(
          "scaler", [](OwningTrainer& self) { return &self.trainer.state().scaler; }, py::return_value_policy::reference_internal)
      .def_property_readonly("learning_rate",
                             [](const OwningTrainer& self) {
                               const TrainState& run = self.trainer.state();
                               return run.schedule.learning_rate(run.base_learning_rate, run.optimizer.step_count());
                             })
      .def(
          "rate_factor",
          [](const OwningTrainer& self, int64_t step, int64_t training_steps) {
            return self.trainer.schedule_over(training_steps).factor(step, self.trainer.state().base_learning_rate);
          },
          py::arg("step"), py::arg("training_steps"),
          "What the schedule over so many optimizer steps multiplies the base rate by after `step` of them.")
      .def(
          "optimizer_step", [](OwningTrainer& self, double rate) { self.trainer.state().optimizer.step(rate); }, py::arg("rate"),
          NoGil(), "The optimizer that `optim` names, over all adapters.")
      .def_property_readonly("optimizer_steps",
                             [](const OwningTrainer& self) { return self.trainer.state().optimizer.step_count(); })
      .def(
          "plan_line",
          [](const OwningTrainer& self, int64_t rows, int64_t longest) {
            TrainingArguments parts = self.trainer.args();
            parts.per_device_train_batch_size = rows;
            return plan_line(*self.model, parts, longest, /*evaluates=*/false);
          },
          py::arg("rows"), py::arg("longest"), NoGil(), "What a run says at its start, of micro-batches of so many rows.")
      .def(
          "zero_grad", [](OwningTrainer& self) { self.trainer.state().arena->zero_grad(); },
          "Zeroes the gradients, and binds those that were set to None.")
      .def(
          "bind_values", [](OwningTrainer& self) { self.trainer.state().arena->bind_values(); },
          "Takes in parameters that got other memory by `.data =`.")
      .def(
          "clip_grad_norm",
          [](OwningTrainer& self, double max_norm) {
            AdapterArena& arena = *self.trainer.state().arena;
            const GradientNorm gradients = gradient_norm(arena, at::Tensor(), max_norm);
            at::Tensor(arena.gradients()).mul_(gradients.multiplier);
            return gradients.norm;
          },
          py::arg("max_norm"), NoGil(), "() the global norm before clipping; 0 does not clip.");
}

}  // namespace qlorapp::python
