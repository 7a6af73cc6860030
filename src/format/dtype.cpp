// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/dtype.hpp"

#include <array>

#include "core/check.hpp"

namespace qlorapp::format {
namespace {

struct Row {
  std::string_view name;
  int64_t bits;
};
constexpr std::array<Row, kDtypeCount> kRows{{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
}};

constexpr std::array<std::pair<Dtype, std::string_view>, 3> kWeightTypes{
    {{Dtype::kF32, "float32"}, {Dtype::kF16, "float16"}, {Dtype::kBF16, "bfloat16"}}};

}  // namespace

std::string_view dtype_name(Dtype dtype) { return kRows[static_cast<size_t>(dtype)].name; }

int64_t dtype_bits(Dtype dtype) { return kRows[static_cast<size_t>(dtype)].bits; }

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

std::optional<Dtype> weight_dtype_from_torch_name(std::string_view name) {
  for (const auto& [dtype, spelling] : kWeightTypes) {
    if (spelling == name) return dtype;
  }
  return std::nullopt;
}

std::string_view torch_name(Dtype weight_dtype) {
  for (const auto& [dtype, spelling] : kWeightTypes) {
    if (dtype == weight_dtype) return spelling;
  }
  throw ValueError(
      message("[dtype] weights must be float32, float16 or bfloat16; got {}. Convert them.", dtype_name(weight_dtype)));
}

}  // namespace qlorapp::format
