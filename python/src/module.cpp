// SPDX-License-Identifier: Apache-2.0
// qlorapp._C: one bind_*.cpp a topic, each with a function that is called here. Bindings only convert.
#include "bind.hpp"

PYBIND11_MODULE(_C, m) {
  using namespace qlorapp::python;
  m.doc() = "C++ side of qlorapp.";
  m.attr("__version__") = QLORAPP_VERSION;
  m.attr("torch_version") = QLORAPP_TORCH_VERSION;
  bind_errors(m);
  bind_config(m);
  bind_quant(m);
  bind_nn(m);
  bind_model(m);
  bind_generate(m);
  bind_data(m);
  bind_train(m);
  bind_answers(m);
  bind_checkpoints(m);
  bind_steps(m);
  bind_plan(m);
}
