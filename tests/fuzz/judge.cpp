// SPDX-License-Identifier: Apache-2.0
// Reads files that strangers wrote, by their paths, as the library does. For tests/python/test_hostile_files.py.
//
// judge MODEL: a line of standard input is KIND, a tab and a path. judge stream: inputs of the differential test (differential.py).
// A line of standard output is a JSON object: the class of the error ("" if it was accepted), its text, the real paths of the files that
// were opened, and the most memory so far in KiB.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/manifest.hpp"
#include "format/quant_state.hpp"
#include "format/safetensors.hpp"
#include "format/tensor_files.hpp"
#include "io/checkpoint_folder.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/text_tools.hpp"
#include "qlorapp/text/tokenizer.hpp"
#include "text/json_reading.hpp"

namespace {

using namespace qlorapp;

/// A model folder, whose tokenizer and chat template rows are made with.
std::string& model() {
  static std::string folder;
  return folder;
}

std::vector<std::string>& opened() {
  static std::vector<std::string> paths;
  return paths;
}

int open_noted(int folder, const char* path, int flags, int mode) {
  const auto file = static_cast<int>(::syscall(SYS_openat, folder, path, flags, mode));
  char real[4096];
  const ssize_t length = file < 0 ? -1 : ::readlink(message("/proc/self/fd/{}", file).c_str(), real, sizeof real);
  if (length > 0) opened().emplace_back(real, static_cast<size_t>(length));
  return file;
}

const std::map<std::string, std::function<void(const std::string&)>>& readers() {
  static const std::map<std::string, std::function<void(const std::string&)>> all = {
      {"safetensors",
       [](const std::string& path) {
         const format::SafetensorsFile file(path);
         std::vector<std::byte> byte(1);
         for (const format::TensorEntry& entry : file.tensors()) {
           if (entry.nbytes > 0) file.read(entry, entry.nbytes - 1, byte);
         }
       }},
      {"model", [](const std::string& path) { const format::TensorFiles files(path); }},
      {"config", [](const std::string& path) { (void)format::load_model_config(path); }},
      {"adapter", [](const std::string& path) { (void)format::load_adapter_config(path); }},
      {"quant_state", [](const std::string& path) { (void)format::parse_quant_state(read_file_inside(path, 1 << 20), path); }},
      {"checkpoint", [](const std::string& path) { check_checkpoint(path); }},
      {"output",
       [](const std::string& path) {
         const NewestCheckpoint newest = newest_checkpoint(path);
         if (!newest.skipped.empty()) throw FormatError(message("[{}] skipped {}", path, joined(newest.skipped)));
       }},
      {"tokenizer", [](const std::string& path) { (void)Tokenizer::from_folder(path); }},
      {"rows", [](const std::string& path) {
         static const Tokenizer tokenizer = Tokenizer::from_folder(model());
         static const std::optional<ChatTemplate> chat = ChatTemplate::from_folder(model());
         GivenTextTools tools(&tokenizer, chat ? &*chat : nullptr);
         opened().clear();
         (void)Dataset::read(path, {}, tools);
       }}};
  return all;
}

struct Verdict {
  std::string error, text;
};

Verdict judge(const std::function<void()>& read) {
  try {
    read();
    return {};
  } catch (const FormatError& error) { return {"FormatError", error.what()}; } catch (const IoError& error) {
    return {"IoError", error.what()};
  } catch (const OutOfMemoryError& error) { return {"OutOfMemoryError", error.what()}; } catch (const ValueError& error) {
    return {"ValueError", error.what()};
  } catch (const std::exception& error) { return {"std::exception", error.what()}; }
}

/// Most memory that this program has had, in KiB. Not getrusage()'s, which knows the process that started it.
long peak() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::atol(line.c_str() + 6);
  }
  return 0;
}

/// Inputs as four bytes of length and content; answers with a line each: "ok", or what is wrong.
void judge_stream() {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  const int file = ::memfd_create("input", 0);
  const std::string path = message("/proc/self/fd/{}", file);
  std::string input;
  for (uint32_t size = 0; std::fread(&size, sizeof size, 1, stdin) == 1;) {
    input.resize(size);
    if (std::fread(input.data(), 1, size, stdin) != size || ::ftruncate(file, 0) != 0 ||
        ::pwrite(file, input.data(), size, 0) != static_cast<ssize_t>(size))
      std::abort();
    const Verdict verdict = judge([&] { const format::SafetensorsFile read(path); });
    std::puts(verdict.error.empty() ? "ok" : verdict.text.substr(0, verdict.text.find('\n')).c_str());
  }
}

}  // namespace

extern "C" {
// In front of libc's: what is opened is noted.
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, int) : 0;
  va_end(rest);
  return open_noted(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, int) : 0;
  va_end(rest);
  return open_noted(folder, path, flags, mode);
}
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (std::string(argv[1]) == "stream") {
    judge_stream();
    return 0;
  }
  model() = argv[1];
  for (std::string line; std::getline(std::cin, line);) {
    const size_t tab = line.find('\t');
    const auto& read = readers().at(line.substr(0, tab));
    const std::string path = line.substr(tab + 1);
    opened().clear();
    const Verdict verdict = judge([&] { read(path); });
    const nlohmann::json answer = {{"error", verdict.error}, {"text", verdict.text}, {"opened", opened()}, {"peak", peak()}};
    std::cout << answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  }
  return 0;
}
