// SPDX-License-Identifier: Apache-2.0
/// Carries out the status column of a field table: what is refused throws, what has no effect is said.
#pragma once

#include <string_view>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {

/// Looks at every field whose value differs from the default. Each remark is logged once in a process.
/// @param where  The config's name, for the message.
/// @throws ValueError for the first field that is refused, with its reason.
template <class Config>
void apply_field_status(const Config& config, std::string_view where) {
  const Config defaults{};
  for_each_field<Config>([&](const auto& field) {
    if (field.status == FieldStatus::kUsed || config.*field.member == defaults.*field.member) return;
    QLORAPP_CHECK_VALUE(field.status != FieldStatus::kRefused, '[', where, "] ", field.name, " is not supported: ", field.reason);
    log_warning_once(concat('[', where, "] ", field.name, " has no effect: ", field.reason));
  });
}

/// Says once that a name is older, and what it is called now.
inline void say_older_name(std::string_view where, std::string_view alias, std::string_view name) {
  log_warning_once(concat('[', where, "] ", alias, " is called ", name, " now; both are understood."));
}

}  // namespace qlorapp
