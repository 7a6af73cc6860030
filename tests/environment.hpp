// SPDX-License-Identifier: Apache-2.0
/// Environment variables of one test.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

/// Sets a variable, or with null unsets it. The process's own value comes back afterwards.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) const {
    if (value == nullptr) unsetenv(name_);
    else setenv(name_, value, /*overwrite=*/1);
  }
  const char* name_;
  std::optional<std::string> before_;
};
