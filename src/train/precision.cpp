// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/precision.hpp"

#include "qlorapp/core/check.hpp"

namespace qlorapp {

std::string_view to_string(Precision precision) {
  switch (precision) {
    case Precision::kBf16:
      return "bf16";
    case Precision::kFp16:
      return "fp16";
    case Precision::kFp32:
      break;
  }
  return "no";
}

std::string describe_mixed_precision(std::string_view gpu_name, Precision precision) {
  switch (precision) {
    case Precision::kBf16:
      return concat(gpu_name, ": Using BF16 (best)");
    case Precision::kFp16:
      return concat(gpu_name, ": Using FP16 with loss scaling");
    case Precision::kFp32:
      break;
  }
  return {};
}

}  // namespace qlorapp
