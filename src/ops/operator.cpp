// SPDX-License-Identifier: Apache-2.0
#include "ops/operator.hpp"

#include <c10/util/Exception.h>

#include "qlorapp/core/error.hpp"

namespace qlorapp::ops {

void rethrow_operator_error() {
  try {
    throw;
  } catch (const c10::ValueError& error) { throw ValueError(error.what_without_backtrace()); } catch (const c10::TypeError& error) {
    throw TypeError(error.what_without_backtrace());
  }
}

}  // namespace qlorapp::ops
