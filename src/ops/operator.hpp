// SPDX-License-Identifier: Apache-2.0
/// Typed calls of registered operators, for the functions of this layer's headers.
///
/// A kernel refuses an argument with c10's errors, because torch.ops raises those as Python's ValueError and TypeError. A C++ caller
/// gets the library's own (qlorapp/core/error.hpp): the call translates them.
#pragma once

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace qlorapp::ops {

/// Other failures of our kernels. Types of their own tell them from torch's c10::Error and c10::OutOfMemoryError, which stay as they
/// are. Python: RuntimeError and torch.OutOfMemoryError.
class KernelError : public c10::Error {
 public:
  using c10::Error::Error;
};
class KernelOutOfMemory : public c10::OutOfMemoryError {
 public:
  using c10::OutOfMemoryError::OutOfMemoryError;
};

/// For a scope inside of an operator's kernel: errors of calls stay c10's, and the outer call translates them.
class InsideKernel {
 public:
  InsideKernel();
  ~InsideKernel();
  InsideKernel(const InsideKernel&) = delete;
  InsideKernel& operator=(const InsideKernel&) = delete;

 private:
  bool outer_;
};

/// In an autograd kernel: calls go to the kernels below autograd and below what counts a tensor's versions.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  InsideKernel inside;
};

/// In a handler: throws c10's ValueError and TypeError and the two above again as the library's, without torch's backtrace, and
/// others as they are.
[[noreturn]] void rethrow_operator_error();

template <class Signature>
class Operator;

template <class Result, class... Arguments>
class Operator<Result(Arguments...)> {
 public:
  explicit Operator(const char* name, const char* overload = "")
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Result(Arguments...)>()) {}

  /// Through the dispatcher: device, autograd and tracing are chosen by the arguments.
  Result call(Arguments... arguments) const {
    try {
      return handle_.call(std::forward<Arguments>(arguments)...);
    } catch (const c10::Error&) { rethrow_operator_error(); }
  }

 private:
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

}  // namespace qlorapp::ops
