// SPDX-License-Identifier: Apache-2.0
// qlorapp._C: one bind_*.cpp a topic, each with a function that is called here. Bindings only convert.
#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ side of qlorapp.";
  m.attr("__version__") = QLORAPP_VERSION;
  m.attr("torch_version") = QLORAPP_TORCH_VERSION;
}
