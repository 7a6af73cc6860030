// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/bits_and_bytes_config.hpp"

#include <algorithm>
#include <string_view>

#include "core/check.hpp"
#include "core/nearest_name.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kWhere = "BitsAndBytesConfig";

void one_of(std::string_view name, const std::string& value, const std::vector<std::string_view>& known) {
  QLORAPP_CHECK_VALUE(std::find(known.begin(), known.end(), value) != known.end(), "[{}] {} must be one of {}; got '{}'.{}", kWhere,
                      name, joined(known), value, did_you_mean(value, known));
}

}  // namespace

void BitsAndBytesConfig::validate() const {
  if (bnb_4bit_compute_dtype) one_of("bnb_4bit_compute_dtype", *bnb_4bit_compute_dtype, {"float32", "float16", "bfloat16"});
  one_of("bnb_4bit_quant_type", bnb_4bit_quant_type, {"nf4", "fp4"});
}

}  // namespace qlorapp::format
