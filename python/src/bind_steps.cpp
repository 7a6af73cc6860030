// SPDX-License-Identifier: Apache-2.0
// StepRunner: steps of windows that another loop reads.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "format/config_json.hpp"
#include "qlorapp/data/collate.hpp"
#include "train/run_setup.hpp"
#include "train/step_runner.hpp"

namespace qlorapp::python {
namespace {

std::unique_ptr<StepRunner> make_runner(const std::shared_ptr<CausalLM>& model, const std::string& arguments_json,
                                        bool token_statistics, const std::string& group, int64_t longest_row) {
  TrainingArguments args;
  format::from_json(format::parse_json(arguments_json, "TrainingArguments"), args, "TrainingArguments");
  const py::gil_scoped_release no_gil;
  StepRunner::Options options{.token_statistics = token_statistics, .longest_row = longest_row};
  const std::shared_ptr<Communicator> of_base = ranks_of_base(*model);
  if (!group.empty() && !of_base) options.ranks = communicator_over(group, model->device());
  return reporting_failures(of_base ? of_base.get() : options.ranks.get(),
                            [&] { return std::make_unique<StepRunner>(model, std::move(args), std::move(options)); });
}

bool gradients(StepRunner& self, const std::vector<const UnpaddedBatch*>& window, const std::function<bool()>& stop_now) {
  std::vector<Batch> batches;
  for (const UnpaddedBatch* batch : window) batches.push_back(batch->batch);
  return self.gradients(batches, stop_now);
}

}  // namespace

void bind_steps(py::module_& m) {
  py::class_<StepRunner>(m, "StepRunner", "src/train/step_runner.hpp")
      .def(py::init(&make_runner), py::arg("model"), py::arg("arguments_json"), py::arg("token_statistics") = false,
           py::arg("group") = "", py::arg("longest_row") = 0,
           "group: the name of a process group of torch.distributed whose ranks train together. longest_row: in tokens, for a "
           "memory_budget; 0: max_length.")
      .def(
          "arguments", [](const StepRunner& self) { return format::to_json(self.arguments()).dump(); },
          "As JSON: those that were given, with what a memory_budget chose.")
      .def(
          "run_worst_case", [](StepRunner& self, const UnpaddedBatch& largest) { self.run_worst_case(largest.batch); },
          py::arg("largest"), NoGil(), "Forward and backward without an update: memory runs out here if it ever does.")
      .def("gradients", &gradients, py::arg("window"), py::arg("stop_now"), NoGil(),
           "Forward and backward of a step's micro-batches. False if stop_now() was true on a rank between two of them: then "
           "nothing has "
           "changed.")
      .def("sum", &StepRunner::sum, py::arg("values"), NoGil(), "Over the ranks. Synchronizes.")
      .def("report_failure", &StepRunner::report_failure, py::arg("why"), NoGil(), "Ends the other ranks with the same message.")
      .def("take_gradients", &StepRunner::take_gradients, py::arg("mean_loss"), py::arg("micro_batches"), NoGil(),
           "The same for gradients, times scale(), that a backward pass has left in the parameters' .grad.")
      .def("update", &StepRunner::update, py::arg("rate"), NoGil(), "False if float16 overflowed: then nothing has changed.")
      .def("read", &StepRunner::read, NoGil(), "Raises RuntimeError if gradients were not finite. Synchronizes.")
      .def("scale", &StepRunner::scale)
      .def("clear_graphs", &StepRunner::clear_graphs)
      .def_property(
          "global_step", [](StepRunner& self) { return self.state().global_step; },
          [](StepRunner& self, int64_t step) { self.state().global_step = step; }, "Steps of the run so far, skipped ones too.")
      .def_property_readonly("is_open", &StepRunner::is_open, "The last window had no update so far.")
      .def_property_readonly(
          "mean_loss", [](const StepRunner& self) { return self.found().mean_loss; }, "() of the last window, on the device.")
      .def_property_readonly(
          "input_tokens", [](const StepRunner& self) { return self.found().input_tokens; }, "Of the last window.")
      .def_property_readonly(
          "token_statistics", [](const StepRunner& self) { return self.found().token_statistics; },
          "(micro-batches, 3) float32 of the last window, on the device: the summed entropy of the predictions, how many targets "
          "are the "
          "most probable token, and how many there are. None unless they were asked for.")
      .def_property_readonly(
          "grad_norm", [](const StepRunner& self) { return self.found().norm.norm; }, "() before clipping, on the device.")
      .def_property_readonly(
          "scaler", [](StepRunner& self) { return &self.state().scaler; }, py::return_value_policy::reference_internal)
      .def_property(
          "steps", [](StepRunner& self) { return self.state().optimizer.step_count(); },
          [](StepRunner& self, int64_t steps) { self.state().optimizer.set_step_count(steps); }, "Updates so far.")
      .def_property(
          "micro_step", [](StepRunner& self) { return self.state().micro_step; },
          [](StepRunner& self, uint32_t micro_step) { self.state().micro_step = micro_step; },
          "Micro-batches so far: a part of the key of dropout masks.")
      .def(
          "moments",
          [](StepRunner& self) {
            std::vector<std::pair<std::string, at::Tensor>> moments = self.state().optimizer.state_tensors();
            for (auto& [name, moment] : moments) moment = flat_aliases({moment}).front();
            return moments;
          },
          "[(name, tensor)] flat over the arena, in the optimizer's memory: exp_avg and exp_avg_sq, or state1, state2, absmax1, "
          "absmax2.");
}

}  // namespace qlorapp::python
