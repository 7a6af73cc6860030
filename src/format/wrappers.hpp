// SPDX-License-Identifier: Apache-2.0
/// The part for text of a checkpoint that also reads images.
#pragma once

#include <string>

#include "qlorapp/format/model_config.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp::format {

struct TextPart {
  const Wrapper* wrapper;  ///< Null: the config was none of a wrapper.
  Json config;
  std::string where;  ///< Names it in messages.
};

/// The text_config of a wrapper, with what holds for the whole model; another config as it is.
/// @throws FormatError if text_config is no object, or a key beside it misspells one that counts.
[[nodiscard]] TextPart text_part(Json config, std::string where);

}  // namespace qlorapp::format
