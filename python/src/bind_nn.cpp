// SPDX-License-Identifier: Apache-2.0
// LoraLinear and the engine below CheckpointedBlock.
#include "bind.hpp"
#include "core/check.hpp"
#include "qlorapp/nn/checkpointed_block.hpp"
#include "qlorapp/nn/lora_linear.hpp"

namespace qlorapp::python {
namespace {

/// A Python callable as the engine wants one: it takes the GIL for as long as Python runs, and to let go of the callable.
std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run_in_python(py::function run) {
  const std::shared_ptr<py::function> held(new py::function(std::move(run)), [](const py::function* callable) {
    const py::gil_scoped_acquire gil;
    delete callable;
  });
  return [held](const std::vector<at::Tensor>& inputs) {
    const py::gil_scoped_acquire gil;
    py::list arguments;
    for (const at::Tensor& input : inputs) arguments.append(input.defined() ? py::cast(input) : py::none());
    const py::object result = (*held)(*arguments);
    if (py::isinstance<py::tuple>(result) || py::isinstance<py::list>(result)) return result.cast<std::vector<at::Tensor>>();
    return std::vector{result.cast<at::Tensor>()};
  };
}

std::vector<at::Tensor> checkpoint_python(py::function run, const MaybeTensors& inputs, bool keep_linear_outputs) {
  const auto in_cpp = run_in_python(std::move(run));
  const py::gil_scoped_release no_gil;
  return checkpoint_tensors(in_cpp, undefined_for_none(inputs), {.keep_linear_outputs = keep_linear_outputs});
}

std::unique_ptr<LoraLinear> make_lora_linear(const std::variant<QuantizedTensor, at::Tensor>& base, int64_t r, double lora_alpha,
                                             double lora_dropout, bool use_rslora, bool gaussian_init, uint64_t seed,
                                             const std::optional<at::Tensor>& bias) {
  FrozenWeight weight = std::visit([](const auto& value) { return FrozenWeight(value); }, base);
  return std::make_unique<LoraLinear>(
      std::move(weight),
      LoraLinear::Options{
          .r = r, .lora_alpha = lora_alpha, .lora_dropout = lora_dropout, .use_rslora = use_rslora, .gaussian_init = gaussian_init},
      seed, bias.value_or(at::Tensor()));
}

LoraLinear::MergeInto merge_into(const std::string& word) {
  QLORAPP_CHECK_VALUE(word == "dense" || word == "four_bit", "[lora_linear] merge must go into 'dense' or 'four_bit'; got '{}'.",
                      word);
  return word == "dense" ? LoraLinear::MergeInto::kDense : LoraLinear::MergeInto::kFourBit;
}

}  // namespace

void bind_nn(py::module_& m) {
  m.def("checkpoint", &checkpoint_python, py::arg("run"), py::arg("inputs"), py::arg("keep_linear_outputs") = false,
        "Outputs of run(*inputs), of which backward keeps the inputs only; include/qlorapp/nn/checkpointed_block.hpp.");

  py::class_<LoraLinear>(m, "LoraLinear", "include/qlorapp/nn/lora_linear.hpp")
      .def(py::init(&make_lora_linear), py::arg("base"), py::arg("r"), py::arg("lora_alpha"), py::arg("lora_dropout"),
           py::arg("use_rslora"), py::arg("gaussian_init"), py::arg("seed"), py::arg("bias") = std::nullopt)
      .def("forward", py::overload_cast<const at::Tensor&, bool>(&LoraLinear::forward, py::const_), py::arg("x"),
           py::arg("training"), NoGil())
      .def(
          "adopt_parameters", [](LoraLinear& self, const at::Tensor& a, const at::Tensor& b) { self.adopt_parameters(a, b); },
          py::arg("a"), py::arg("b"))
      .def(
          "to", [](LoraLinear& self, const at::Device& device) { self.to(device); }, py::arg("device"), NoGil())
      .def(
          "merge", [](LoraLinear& self, const std::string& into) { self.merge(merge_into(into)); }, py::arg("into"), NoGil())
      .def("unmerge", &LoraLinear::unmerge)
      .def_property_readonly("a", &LoraLinear::a)
      .def_property_readonly("b", &LoraLinear::b)
      .def_property_readonly("scaling", &LoraLinear::scaling)
      .def_property_readonly("merged", &LoraLinear::merged)
      .def_property_readonly("in_features", [](const LoraLinear& self) { return self.base().in_features(); })
      .def_property_readonly("out_features", [](const LoraLinear& self) { return self.base().out_features(); });
}

}  // namespace qlorapp::python
