// SPDX-License-Identifier: Apache-2.0
/// A template in Jinja, run as transformers runs it: Jinja's immutable sandbox with trim_blocks, lstrip_blocks, loop controls and
/// {% generation %}. Torch-free.
///
/// A template comes with a model from anywhere, so a run is bounded: in steps, in the length of a text, in the depth of calls. Nothing but
/// its variables is reached.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "syntax.hpp"
#include "value.hpp"

namespace qlorapp::jinja {

class Template {
 public:
  /// @throws FormatError as parse().
  Template(std::string_view source, const std::string& where) : body_(std::make_shared<const Body>(parse(source, where))) {}

  struct Rendered {
    std::string text;
    std::vector<std::pair<std::size_t, std::size_t>> generated;  ///< Bytes of the {% generation %} blocks.
  };
  /// @param variables  what the template sees beside Jinja's own functions.
  /// @throws Failure if the template raises, or for a run beyond the bounds. May be called from several threads.
  [[nodiscard]] Rendered render(const Dict& variables) const;

 private:
  std::shared_ptr<const Body> body_;
};

}  // namespace qlorapp::jinja
