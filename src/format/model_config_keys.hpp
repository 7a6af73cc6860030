// SPDX-License-Identifier: Apache-2.0
/// The keys of config.json that parse_model_config does not read.
#pragma once

#include "json/json_fields.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {

/// Refuses those that change the result or name code, and those that misspell a key that matters. Logs others once.
/// @throws FormatError naming the key.
void judge_other_keys(JsonFields& fields, const Family& family);

/// Of a wrapper: most are about images, and none is read but those that text_part() inherits.
/// @throws FormatError naming one that misspells a key that counts.
void judge_keys_around_text(const Json& config, const std::string& where);

/// Throws UnsupportedModel: the family's row does not compute what the key asks for.
[[noreturn]] void refuse(const JsonFields& fields, const Family& family, std::string_view key, std::string_view rule,
                         const Json& got);

}  // namespace qlorapp::format
