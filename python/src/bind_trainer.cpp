// SPDX-License-Identifier: Apache-2.0
// Trainer, whose callbacks take the GIL for as long as Python runs.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "qlorapp/format/config_json.hpp"
#include "qlorapp/io/checkpoint_folder.hpp"
#include "qlorapp/train/trainer.hpp"

namespace qlorapp::python {
namespace {

py::dict to_dict(const LogRecord& record) {
  py::dict result;
  for (const auto& [key, value] : record.values()) result[py::str(key)] = value;
  return result;
}

/// events(name, payload, control): the control can be written to while the call lasts.
TrainerCallbacks callbacks_from(const py::function& events) {
  const std::shared_ptr<py::function> held(new py::function(events), [](const py::function* callable) {
    const py::gil_scoped_acquire gil;
    delete callable;
  });
  const auto by_reference = [](TrainerControl& control) { return py::cast(&control, py::return_value_policy::reference); };
  TrainerCallbacks callbacks;
  callbacks.on_log = [=](const LogRecord& record, TrainerControl& control) {
    const py::gil_scoped_acquire gil;
    (*held)("log", to_dict(record), by_reference(control));
  };
  callbacks.on_step_end = [=](int64_t step, int64_t max_steps, TrainerControl& control) {
    const py::gil_scoped_acquire gil;
    (*held)("step_end", py::make_tuple(step, max_steps), by_reference(control));
  };
  callbacks.on_evaluate = [=](const LogRecord& metrics, TrainerControl& control) {
    const py::gil_scoped_acquire gil;
    (*held)("evaluate", to_dict(metrics), by_reference(control));
  };
  callbacks.on_save = [=](const std::string& folder) {
    const py::gil_scoped_acquire gil;
    (*held)("save", folder, py::none());
  };
  callbacks.on_substep_end = [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  return callbacks;
}

using Row = std::pair<std::vector<TokenId>, std::vector<TokenId>>;

std::vector<Example> examples_from(std::vector<Row> rows) {
  std::vector<Example> examples;
  for (auto& [input_ids, labels] : rows) {
    examples.push_back({std::move(input_ids), std::move(labels), static_cast<int64_t>(examples.size()) + 1});
  }
  return examples;
}

/// The trainer and the model that it refers to.
struct OwningTrainer {
  std::shared_ptr<CausalLM> model;
  Trainer trainer;
};

std::unique_ptr<OwningTrainer> make_trainer(const std::shared_ptr<CausalLM>& model, const std::string& arguments_json,
                                            std::vector<Row> train_rows, std::vector<Row> eval_rows, const std::string& base_model,
                                            const py::function& events) {
  TrainingArguments arguments;
  format::from_json(format::parse_json(arguments_json, "TrainingArguments"), arguments, "TrainingArguments");
  TrainerCallbacks callbacks = callbacks_from(events);
  const py::gil_scoped_release no_gil;
  return std::unique_ptr<OwningTrainer>(
      new OwningTrainer{model, Trainer(*model, std::move(arguments), examples_from(std::move(train_rows)),
                                       examples_from(std::move(eval_rows)), base_model, std::move(callbacks))});
}

py::tuple train(OwningTrainer& self, const std::optional<std::string>& resume_from) {
  TrainOutput output;
  {
    const py::gil_scoped_release no_gil;
    output = self.trainer.train(resume_from);
  }
  return py::make_tuple(output.global_step, output.training_loss, to_dict(output.metrics));
}

py::dict evaluate(OwningTrainer& self) {
  LogRecord metrics;
  {
    const py::gil_scoped_release no_gil;
    metrics = self.trainer.evaluate();
  }
  return to_dict(metrics);
}

py::dict state(const OwningTrainer& self) {
  const TrainState& run = self.trainer.state();
  py::list history;
  for (const LogRecord& record : run.log_history) history.append(to_dict(record));
  py::dict result;
  result["global_step"] = run.global_step;
  result["max_steps"] = self.trainer.max_steps();
  result["best_metric"] = run.best_metric;
  result["num_input_tokens_seen"] = run.tokens_seen;
  result["log_history"] = history;
  return result;
}

}  // namespace

void bind_trainer(py::module_& m) {
  m.def("latest_checkpoint", &latest_checkpoint, py::arg("output_dir"), "The newest whole checkpoint folder, or None.");
  py::class_<TrainerControl>(m, "TrainerControl", "What a callback may ask for.")
      .def(py::init<>())
      .def_readwrite("should_training_stop", &TrainerControl::should_training_stop)
      .def_readwrite("should_save", &TrainerControl::should_save)
      .def_readwrite("should_evaluate", &TrainerControl::should_evaluate)
      .def_readwrite("should_log", &TrainerControl::should_log);

  py::class_<OwningTrainer>(m, "Trainer", "include/qlorapp/train/trainer.hpp")
      .def(py::init(&make_trainer), py::arg("model"), py::arg("arguments_json"), py::arg("train_rows"), py::arg("eval_rows"),
           py::arg("base_model"), py::arg("events"))
      .def("train", &train, py::arg("resume_from") = std::nullopt, "(global_step, training_loss, metrics)")
      .def("evaluate", &evaluate)
      .def("state", &state)
      .def(
          "save_model", [](const OwningTrainer& self, const std::string& folder) { self.trainer.save_model(folder); },
          py::arg("folder"), NoGil())
      .def(
          "save_checkpoint", [](OwningTrainer& self) { self.trainer.save_checkpoint(); }, NoGil());
}

}  // namespace qlorapp::python
