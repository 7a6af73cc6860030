// SPDX-License-Identifier: Apache-2.0
#include "ops/operator.hpp"

#include <c10/util/Exception.h>

#include <utility>

#include "qlorapp/core/error.hpp"

namespace qlorapp::ops {
namespace {

thread_local bool inside_kernel = false;

}  // namespace

InsideKernel::InsideKernel() : outer_(std::exchange(inside_kernel, true)) {}
InsideKernel::~InsideKernel() { inside_kernel = outer_; }

void rethrow_operator_error() {
  if (inside_kernel) throw;
  try {
    throw;
  } catch (const c10::ValueError& error) { throw ValueError(error.what_without_backtrace()); } catch (const c10::TypeError& error) {
    throw TypeError(error.what_without_backtrace());
  } catch (const KernelOutOfMemory& error) {
    throw OutOfMemoryError(error.what_without_backtrace());
  } catch (const KernelError& error) { throw Error(error.what_without_backtrace()); }
}

}  // namespace qlorapp::ops
