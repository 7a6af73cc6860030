// SPDX-License-Identifier: Apache-2.0
/// One function a topic; module.cpp calls them. Bindings convert and release the GIL, and know nothing else.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace qlorapp::python {

namespace py = pybind11;
/// Around everything that computes, so that other Python threads run meanwhile. Results are converted after it has ended.
using NoGil = py::call_guard<py::gil_scoped_release>;

/// Python's None is C++'s undefined tensor.
using MaybeTensors = std::vector<std::optional<at::Tensor>>;
inline std::vector<at::Tensor> undefined_for_none(const MaybeTensors& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.value_or(at::Tensor()));
  return result;
}

/// Tensors of their own over the same memory (bind_train.cpp says why).
[[nodiscard]] std::vector<at::Tensor> flat_aliases(const std::vector<at::Tensor>& moments);

void bind_errors(py::module_& m);
void bind_config(py::module_& m);
void bind_quant(py::module_& m);
void bind_nn(py::module_& m);
void bind_model(py::module_& m);
void bind_generate(py::module_& m);
void bind_data(py::module_& m);
void bind_train(py::module_& m);
void bind_steps(py::module_& m);
void bind_answers(py::module_& m);
void bind_checkpoints(py::module_& m);
void bind_plan(py::module_& m);

}  // namespace qlorapp::python
