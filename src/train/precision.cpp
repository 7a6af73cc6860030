// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/precision.hpp"

#include "core/check.hpp"

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
      return message("{}: Using BF16 (best)", gpu_name);
    case Precision::kFp16:
      return message("{}: Using FP16 with loss scaling", gpu_name);
    case Precision::kFp32:
      break;
  }
  return {};
}

}  // namespace qlorapp
