// SPDX-License-Identifier: Apache-2.0
#include "hf_text.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "qlorapp/format/json.hpp"

namespace qlorapp::cli {
namespace {

using format::Json;

[[noreturn]] void fail(const char* what, int number) {
  throw IoError(message("[transformers] the Python process {}: {}. Check QLORAPP_PYTHON.", what, std::strerror(number)), number);
}

pid_t spawn(const std::string& python, std::vector<std::string> arguments, int socket) {
  arguments.insert(arguments.begin(), python);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, socket, STDIN_FILENO);          // requests and answers
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);  // libraries' output is not an answer
  pid_t process = 0;
  const int number = posix_spawn(&process, python.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (number != 0) fail("cannot be started", number);
  return process;
}

/// Characters of `ranges` are bytes.
std::vector<TextRange> ranges_of(const Json& list) {
  std::vector<TextRange> out;
  for (const Json& range : list) out.push_back({range.at(0).get<std::size_t>(), range.at(1).get<std::size_t>()});
  return out;
}

}  // namespace

std::unique_ptr<HfText> HfText::start(const std::string& folder, const std::string& chat_template) {
  const char* python = std::getenv("QLORAPP_PYTHON");
  const char* script = std::getenv("QLORAPP_HF_TEXT");
  if (python == nullptr || script == nullptr || *python == '\0' || *script == '\0') return nullptr;
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) fail("cannot be reached", errno);
  pid_t process = 0;
  try {
    process = spawn(python, {script, folder, chat_template}, ends[1]);
  } catch (...) {
    close(ends[0]);
    close(ends[1]);
    throw;
  }
  close(ends[1]);
  std::unique_ptr<HfText> out(new HfText(ends[0], process));
  const Json facts = out->ask({{"do", "open"}});
  out->has_template_ = facts.at("template").get<bool>();
  out->eos_ids_ = facts.at("eos_ids").get<std::vector<TokenId>>();
  if (!facts.at("eos_id").is_null()) out->eos_id_ = facts.at("eos_id").get<TokenId>();
  out->id_limit_ = facts.at("id_limit").get<int64_t>();
  return out;
}

HfText::~HfText() {
  close(socket_);  // it reads the end of its input, and ends
  int status = 0;
  while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {}
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

RenderedChat HfText::render(std::span<const Message> messages, const ChatOptions& options) {
  Json list = Json::array();
  for (const Message& message : messages) {
    Json entry{{"role", message.role}, {"content", message.content}};
    if (!message.rest.empty()) entry.update(Json::parse(message.rest));
    list.push_back(std::move(entry));
  }
  Json request{{"do", "render"}, {"messages", std::move(list)}, {"prompt", options.add_generation_prompt}};
  if (!options.tools.empty()) request["tools"] = Json::parse(options.tools);
  request["date"] = options.date_string.value_or(std::string(kDefaultDate));
  request["turns"] = options.turns;
  const Json answer = ask(request);
  RenderedChat out{answer.at("text").get<std::string>(), {}};
  for (const TextRange& range : ranges_of(answer.at("turns"))) out.turns.push_back({"assistant", range, range.begin, range.end});
  return out;
}

Json HfText::ask(const Json& request) {
  std::string line;
  try {
    line = request.dump();
  } catch (const Json::type_error&) { throw ValueError("[transformers] text must be UTF-8; got other bytes. Convert it."); }
  send_line(line + "\n");
  const Json answer = Json::parse(receive_line());
  if (answer.contains("error")) throw ValueError(answer["error"].get<std::string>());
  return answer.at("ok");
}

void HfText::send_line(const std::string& line) {
  for (std::size_t sent = 0; sent < line.size();) {
    const ssize_t bytes = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail("has ended", errno);
    sent += static_cast<std::size_t>(bytes);
  }
}

std::string HfText::receive_line() {
  std::array<char, 1 << 16> block;
  std::size_t searched = 0;
  for (;;) {
    const auto end = received_.find('\n', searched);
    if (end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    searched = received_.size();
    const ssize_t bytes = recv(socket_, block.data(), block.size(), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) fail("has ended", bytes < 0 ? errno : ECHILD);
    received_.append(block.data(), static_cast<std::size_t>(bytes));
  }
}

}  // namespace qlorapp::cli
