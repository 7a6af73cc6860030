// SPDX-License-Identifier: Apache-2.0
// C++ errors become the Python errors that a caller expects; what the library has to say goes to a Python callable.
#include <torch/csrc/Exceptions.h>

#include "bind.hpp"
#include "core/escaped.hpp"
#include "qlorapp/core/error.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/train/grad_scaler.hpp"
#include "qlorapp/train/trainer.hpp"

namespace qlorapp::python {
namespace {

PyObject* format_error = nullptr;  // these live as long as the process
PyObject *out_of_memory_error = nullptr, *training_diverged = nullptr;

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const FormatError& e) { PyErr_SetString(format_error, escaped(e.what()).c_str()); } catch (const ValueError& e) {
    PyErr_SetString(PyExc_ValueError, escaped(e.what()).c_str());
  } catch (const TypeError& e) {
    PyErr_SetString(PyExc_TypeError, escaped(e.what()).c_str());
  } catch (const IoError& e) {  // Python picks FileNotFoundError, PermissionError … by the number
    PyErr_SetObject(PyExc_OSError, py::make_tuple(e.error_number(), escaped(e.what())).ptr());
  } catch (const GradScalerAssertion& e) {
    PyErr_SetString(PyExc_AssertionError, escaped(e.what()).c_str());
  } catch (const TrainingDiverged& e) {
    PyErr_SetString(training_diverged, escaped(e.what()).c_str());
  } catch (const OutOfMemoryError& e) { PyErr_SetString(out_of_memory_error, escaped(e.what()).c_str()); } catch (const Error& e) {
    PyErr_SetString(PyExc_RuntimeError, escaped(e.what()).c_str());
  } catch (python_error& e) {
    e.restore();
  } catch (const c10::Error&) {  // IndexError, OutOfMemoryError …: as torch's own functions raise them
    torch::translate_exception_to_python(std::current_exception());
  }
}

/// What a signal's handler raised while a line was logged, where nothing may be thrown. Never destroyed: Python may be gone by then.
std::optional<py::error_already_set>& held_interrupt() {
  static auto* const held = new std::optional<py::error_already_set>();
  return *held;
}

/// For Py_AddPendingCall: raises it where Python's main thread goes on.
int raise_interrupt(void*) {
  if (!held_interrupt()) return 0;
  held_interrupt()->restore();
  held_interrupt().reset();
  return -1;
}

/// As Python's logging numbers its levels.
int level_number(LogLevel level) { return level == LogLevel::kWarning ? 30 : level == LogLevel::kInfo ? 20 : 10; }

void set_sink(const std::optional<std::function<void(int, std::string)>>& sink) {
  if (!sink) return set_log_sink({});
  set_log_sink([say = *sink](LogLevel level, std::string_view line) {
    const py::gil_scoped_acquire gil;
    try {
      say(level_number(level), std::string(line));
    } catch (py::error_already_set& e) {
      if (e.matches(PyExc_KeyboardInterrupt) || e.matches(PyExc_SystemExit)) {
        held_interrupt() = e;
        Py_AddPendingCall(&raise_interrupt, nullptr);
      } else {
        e.discard_as_unraisable("qlorapp's log");
      }
    }
  });
}

}  // namespace

void bind_errors(py::module_& m) {
  format_error = PyErr_NewExceptionWithDoc("qlorapp.FormatError", "A file that breaks its format; the message names it.",
                                           PyExc_ValueError, nullptr);
  m.attr("FormatError") = py::reinterpret_borrow<py::object>(format_error);
  training_diverged =
      PyErr_NewExceptionWithDoc("qlorapp.TrainingDiverged", "Gradients of a step were not finite.", PyExc_RuntimeError, nullptr);
  m.attr("TrainingDiverged") = py::reinterpret_borrow<py::object>(training_diverged);
  out_of_memory_error = py::object(py::module_::import("torch").attr("OutOfMemoryError")).release().ptr();
  py::register_local_exception_translator(&translate);
  m.def("set_log_sink", &set_sink, py::arg("sink").none(true),
        "sink(level, line) receives every line, level being a number of logging's; None discards them.");
}

}  // namespace qlorapp::python
