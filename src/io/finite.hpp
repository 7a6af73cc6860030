// SPDX-License-Identifier: Apache-2.0
/// Whether all numbers of a tensor are finite.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace qlorapp {

/// Reads at memory speed; takes a few MiB on a GPU, where it synchronizes. Integers, meta tensors and undefined ones are finite.
[[nodiscard]] bool all_finite(const at::Tensor& tensor);

/// @param where  folder or file.  @throws FormatError naming it and the tensor, unless all_finite().
void check_finite(const at::Tensor& tensor, const std::string& where, const std::string& name);

}  // namespace qlorapp
