// SPDX-License-Identifier: Apache-2.0
// A program outside the house: public headers, the shared library, and the operators that it registers when it is loaded.
#include <cstdio>

#include <ATen/core/dispatch/Dispatcher.h>

#include <qlorapp/core/units.hpp>
#include <qlorapp/fwd.hpp>  // before the definitions, with which it must agree
#include <qlorapp/qlorapp.hpp>

#ifdef _OPENMP
#error "linking qlorapp::qlorapp turned OpenMP on in its user's code"
#endif

int main() {
  const qlorapp::QuantizedTensor empty;
  const auto op = c10::Dispatcher::singleton().findSchema({"qlorapp::quantize_4bit", ""});
  if (!op.has_value() || empty.defined()) return 1;
  std::puts(qlorapp::to_string(qlorapp::Bytes{1 << 20}).c_str());
  return 0;
}
