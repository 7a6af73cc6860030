// SPDX-License-Identifier: Apache-2.0
/// Rows that are held out of the training data for evaluation.
#pragma once

#include <cstdint>
#include <vector>

#include "qlorapp/data/dataset.hpp"

namespace qlorapp {

/// Takes rows out of `rows`: the first ones of torch.randperm with this seed. A whole row goes to one side; both sides keep the order of the file. The
/// same on every machine, on all ranks and on resume.
/// @param size  a number of rows, or below 1 a share of them, rounded up (as datasets' train_test_split).
/// @returns the rows taken out. @throws ValueError unless at least one row is left on each side.
[[nodiscard]] std::vector<Example> split_off(std::vector<Example>& rows, double size, int64_t seed);

}  // namespace qlorapp
