// SPDX-License-Identifier: Apache-2.0
/// Windows and rotary settings of each layer, from config.json.
#pragma once

#include "json/json_fields.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {

/// Far beyond any model.
inline constexpr int64_t kMaxPositions = int64_t{1} << 40;

/// Settles `ropes` and `layers`. @param default_theta  of the family.  @throws FormatError naming the key.
void settle_layers(ModelConfig& config, JsonFields& fields, double default_theta);

}  // namespace qlorapp::format
