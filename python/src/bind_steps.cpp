// SPDX-License-Identifier: Apache-2.0
// StepRunner: steps of windows that another loop reads.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "core/check.hpp"
#include "format/config_json.hpp"
#include "qlorapp/data/collate.hpp"
#include "train/run_inputs.hpp"
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

std::string base_json(const CausalLM& model) {
  const RunInputs inputs = base_inputs(model);
  format::Json json{{"fingerprint", message("{:016x}", inputs.base)},
                    {"without_scales", message("{:016x}", inputs.base_without_scales)},
                    {"device", inputs.device},
                    {"config", format::Json::object()}};
  for (const auto& [name, value] : inputs.base_config) json["config"][name] = format::parse_json(value, name);
  return json.dump();
}

RunInputs base_from(const std::string& text, const std::string& source) {
  const format::Json json = format::parse_json(text, source);
  const auto bits = [&](const char* name) {
    const std::string digits = json.value(name, "");
    QLORAPP_CHECK_FORMAT(
        !digits.empty() && digits.size() <= 16 && digits.find_first_not_of("0123456789abcdef") == std::string::npos,
        "[resume] {}: '{}' must be a string of hexadecimal digits; got '{}'.", source, name, digits);
    return static_cast<uint64_t>(std::stoull(digits, nullptr, 16));
  };
  RunInputs inputs;
  inputs.base = bits("fingerprint");
  inputs.base_without_scales = bits("without_scales");
  inputs.device = json.value("device", "");
  const format::Json config = json.value("config", format::Json::object());
  for (const auto& [name, value] : config.items()) { inputs.base_config.emplace_back(name, value.dump()); }
  return inputs;
}

}  // namespace

void bind_steps(py::module_& m) {
  m.def(
      "base_inputs", [](const std::shared_ptr<CausalLM>& model) { return base_json(*model); }, py::arg("model"), NoGil(),
      "JSON: fingerprints of the frozen weights, and the fields of config.json that enter the computation. Reads all weights.");
  m.def(
      "check_base",
      [](const std::string& folder, const std::string& saved, const std::string& now) {
        check_base(folder, base_from(saved, folder), base_from(now, folder));
      },
      py::arg("folder"), py::arg("saved"), py::arg("now"), NoGil(),
      "Compares results of base_inputs(). Raises FormatError if a checkpoint belongs to another base.");

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
      .def("check_same", &StepRunner::check_same, py::arg("what"), py::arg("value"), NoGil(),
           "Raises ValueError on all ranks if the value differs between them.")
      .def("report_failure", &StepRunner::report_failure, py::arg("why"), NoGil(), "Ends the other ranks with the same message.")
      .def("take_gradients", &StepRunner::take_gradients, py::arg("mean_loss"), py::arg("micro_batches"), NoGil(),
           "The same for gradients, times scale(), that a backward pass has left in the parameters' .grad.")
      .def("update", &StepRunner::update, py::arg("rate"), NoGil(), "False if float16 overflowed: then nothing has changed.")
      .def("read", &StepRunner::read, NoGil(), "Raises TrainingDiverged if gradients were not finite. Synchronizes.")
      .def_property_readonly("must_read", &StepRunner::must_read,
                             "read() is due. Only with on_non_finite=rollback: else update() reads.")
      .def_property_readonly("skipped_steps", [](StepRunner& self) { return self.state().skipped_steps; })
      .def("scale", &StepRunner::scale)
      .def("load_state", &StepRunner::load_state, py::arg("folder"), NoGil(),
           "Moments, loss scale and counters of a checkpoint that the C++ Trainer wrote. Raises FormatError if base or options "
           "differ.")
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
          "micro_step", [](const StepRunner& self) { return self.whole_micro_steps(); },
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
