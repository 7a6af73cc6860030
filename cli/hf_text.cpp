// SPDX-License-Identifier: Apache-2.0
#include "hf_text.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "qlorapp/json/json.hpp"
#include "text_copy.hpp"

namespace qlorapp::cli {
namespace {

using format::Json;

[[noreturn]] void fail(const char* what, int number) {
  throw IoError(message("[transformers] the Python process {}: {}. Check QLORAPP_PYTHON.", what, std::strerror(number)), number);
}

constexpr double kSecondsPerMiB = 10;
/// A process that neither computes nor answers is given up, too.
constexpr double kIdleFactor = 10;

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, from.size(), to);
}

/// Characters of `ranges` are bytes.
std::vector<TextRange> ranges_of(const Json& list) {
  std::vector<TextRange> out;
  for (const Json& range : list) out.push_back({range.at(0).get<std::size_t>(), range.at(1).get<std::size_t>()});
  return out;
}

}  // namespace

std::unique_ptr<HfText> HfText::start(const std::string& folder, const std::string& model) {
  std::string script = service_script("");
  if (script.empty()) return nullptr;
  const TextCopy copy(folder);
  std::optional<TextCopy> model_copy;  // of an adapter's base, whose config chooses the tokenizer's class
  if (model != folder) model_copy.emplace(model);
  std::vector<std::string> words{std::move(script), copy.path(), model_copy ? model_copy->path() : copy.path()};
  std::unique_ptr<HfText> out(new HfText(std::move(words)));
  Json facts;
  try {
    facts = out->ask({{"do", "open"}});
  } catch (const ValueError& error) {
    std::string text = error.what();
    replace_all(text, copy.path(), folder);
    if (model_copy) replace_all(text, model_copy->path(), model);
    throw ValueError(text);
  }
  out->special_tokens_ = facts.at("special_tokens").get<std::vector<std::string>>();
  out->eos_ids_ = facts.at("eos_ids").get<std::vector<TokenId>>();
  if (!facts.at("eos_id").is_null()) out->eos_id_ = facts.at("eos_id").get<TokenId>();
  out->id_limit_ = facts.at("id_limit").get<int64_t>();
  return out;
}

Encoding HfText::encode(std::string_view text, bool add_special_tokens) {
  const Json answer = ask({{"do", "encode"}, {"text", text}, {"special", add_special_tokens}});
  return {answer.at("ids").get<std::vector<TokenId>>(), ranges_of(answer.at("ranges"))};
}

std::string HfText::decode(std::span<const TokenId> ids, bool skip_special_tokens) {
  const std::vector<TokenId> list(ids.begin(), ids.end());
  return ask({{"do", "decode"}, {"ids", list}, {"skip", skip_special_tokens}}).get<std::string>();
}

std::optional<TokenId> HfText::token_to_id(std::string_view token) {
  const Json id = ask({{"do", "token"}, {"token", token}});
  return id.is_null() ? std::nullopt : std::optional(id.get<TokenId>());
}

Json HfText::ask(const Json& request) {
  if (!stopped_.empty()) throw ValueError(stopped_);
  std::string line;
  try {
    line = request.dump();
  } catch (const Json::type_error&) { throw ValueError("[transformers] text must be UTF-8; got other bytes. Convert it."); }
  if (!service_.send_all(line + "\n")) fail("has ended", errno);
  const Json answer =
      Json::parse(receive_line(seconds_of("QLORAPP_TEXT_SECONDS", 60) + kSecondsPerMiB * static_cast<double>(line.size() >> 20)));
  if (answer.contains("error")) throw ValueError(answer["error"].get<std::string>());
  return answer.at("ok");
}

void HfText::await_answer(double seconds, double until) {
  constexpr int kLook = 250;  // milliseconds. Looks are counted and not the time, which goes on while both are stopped.
  pollfd answer{service_.socket(), POLLIN, 0};
  for (double waited = 0;; waited += 1e-3 * kLook) {
    const int ready = ::poll(&answer, 1, kLook);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail("cannot be heard", errno);
    if (service_.cpu_seconds() <= until && waited <= seconds * kIdleFactor) continue;
    service_.stop(SIGKILL);
    stopped_ = message(
        "[transformers] the tokenizer may take {:.0f} s of CPU time for one row; it took more, and was stopped. Is there a pattern "
        "without "
        "an end in tokenizer.json? Copy it from the model again, shorten the row, or set QLORAPP_TEXT_SECONDS.",
        seconds);
    throw ValueError(stopped_);
  }
}

std::string HfText::receive_line(double seconds) {
  std::array<char, 1 << 16> block;
  std::size_t searched = 0;
  const double until = service_.cpu_seconds() + seconds;
  for (;;) {
    const auto end = received_.find('\n', searched);
    if (end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    searched = received_.size();
    await_answer(seconds, until);
    const ssize_t bytes = recv(service_.socket(), block.data(), block.size(), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) fail("has ended", bytes < 0 ? errno : ECHILD);
    received_.append(block.data(), static_cast<std::size_t>(bytes));
  }
}

}  // namespace qlorapp::cli
