// SPDX-License-Identifier: Apache-2.0
/// The refusal of a file that another program may read. Torch-free.
#pragma once

#include "qlorapp/core/error.hpp"

namespace qlorapp {

/// A tokenizer of a kind that this library does not know. Damage, links and exceeded limits are plain FormatErrors: the
/// commands try transformers after this error alone.
class UnsupportedError : public FormatError {
 public:
  using FormatError::FormatError;
};

}  // namespace qlorapp
