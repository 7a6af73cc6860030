// SPDX-License-Identifier: Apache-2.0
/// A tokenizer of transformers in a Python process beside this one: python/qlorapp/hf/text_service.py.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "python_service.hpp"
#include "qlorapp/text/text_tools.hpp"

namespace qlorapp::cli {

/// One request, one answer, over a socket; the process ends with this object, and with the thread that made it. A request may use
/// QLORAPP_TEXT_SECONDS (default: 60) of CPU time, and 10 more for each MiB of text. Then the process is killed.
class HfText {
 public:
  /// @returns null without QLORAPP_PYTHON and QLORAPP_HF_TEXT (interpreter and script), which `python -m qlorapp` sets.
  /// @param model  the folder of the model that the tokenizer belongs to.
  /// transformers reads a copy of the folders' files (text_copy.hpp).
  /// @throws ValueError with Python's message if transformers is missing or cannot read the folder; as TextCopy.
  static std::unique_ptr<HfText> start(const std::string& folder, const std::string& model);

  [[nodiscard]] const std::vector<std::string>& special_tokens() const { return special_tokens_; }
  [[nodiscard]] const std::vector<TokenId>& eos_ids() const { return eos_ids_; }
  [[nodiscard]] std::optional<TokenId> eos_id() const { return eos_id_; }
  [[nodiscard]] int64_t id_limit() const { return id_limit_; }

  [[nodiscard]] Encoding encode(std::string_view text, bool add_special_tokens);
  [[nodiscard]] std::string decode(std::span<const TokenId> ids, bool skip_special_tokens);
  [[nodiscard]] std::optional<TokenId> token_to_id(std::string_view token);

 private:
  explicit HfText(std::vector<std::string> words) : service_("transformers", std::move(words)) {}
  /// @throws ValueError with the answer's error, or if it takes too long; IoError when the process has ended.
  nlohmann::ordered_json ask(const nlohmann::ordered_json& request);
  std::string receive_line(double seconds);
  /// Returns once the socket can be read. @throws ValueError after `until` seconds of the process's CPU time; it is killed.
  void await_answer(double seconds, double until);

  PythonService service_;
  std::string received_;
  std::string stopped_;  ///< Why the process was killed: the answer to every further request.
  std::vector<std::string> special_tokens_;
  std::vector<TokenId> eos_ids_;
  std::optional<TokenId> eos_id_;
  int64_t id_limit_ = 0;
};

}  // namespace qlorapp::cli
