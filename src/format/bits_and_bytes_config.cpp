// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/bits_and_bytes_config.hpp"

#include <algorithm>
#include <string_view>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/field_status.hpp"
#include "qlorapp/core/nearest_name.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kWhere = "BitsAndBytesConfig";

void one_of(std::string_view name, const std::string& value, const std::vector<std::string_view>& known) {
  QLORAPP_CHECK_VALUE(std::find(known.begin(), known.end(), value) != known.end(), '[', kWhere, "] ", name, " must be one of ",
                      known, "; got '", value, "'.", did_you_mean(value, known));
}

}  // namespace

void BitsAndBytesConfig::validate() const {
  if (bnb_4bit_compute_dtype) one_of("bnb_4bit_compute_dtype", *bnb_4bit_compute_dtype, {"float32", "float16", "bfloat16"});
  one_of("bnb_4bit_quant_type", bnb_4bit_quant_type, {"nf4", "fp4"});
  if (bnb_4bit_quant_storage) {
    one_of("bnb_4bit_quant_storage", *bnb_4bit_quant_storage, {"uint8", "int8", "float16", "bfloat16", "float32", "float64"});
  }
  one_of("quant_method", quant_method, {"bitsandbytes"});
  apply_field_status(*this, kWhere);
}

}  // namespace qlorapp::format
