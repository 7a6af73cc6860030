// SPDX-License-Identifier: Apache-2.0
// One parser, chosen by the environment variable FUZZ_TARGET. An input may be refused with an Error; anything else is a bug.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "data/byte_stream.hpp"
#include "data/row_reader.hpp"
#include "files/checksum.hpp"
#include "files/manifest.hpp"
#include "format/gguf.hpp"
#include "format/gguf_config.hpp"
#include "format/gguf_weights.hpp"
#include "format/quant_state.hpp"
#include "format/safetensors.hpp"
#include "format/safetensors_header.hpp"
#include "format/tensor_files.hpp"
#include "io/checkpoint_folder.hpp"
#include "json/python_json.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "text/json_reading.hpp"
#include "text/tokenizer_json.hpp"
#include "train/run_state_reader.hpp"

namespace {

using namespace qlorapp;

/// A file in memory with the input as its content.
std::string file_with(std::string_view content) {
  static const int file = ::memfd_create("fuzz", 0);
  static const std::string path = message("/proc/self/fd/{}", file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, content.data(), content.size(), 0) != static_cast<ssize_t>(content.size()))
    std::abort();
  return path;
}

int write_file(const std::string& path, std::string_view content) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0 || ::write(file, content.data(), content.size()) != static_cast<ssize_t>(content.size())) std::abort();
  return ::close(file);
}

/// A folder in memory, made once; the input is cut at NUL bytes into the contents of these files.
std::string folder_with(std::string_view input, std::initializer_list<const char*> names) {
  static const std::string folder = [] {
    std::string made = "/dev/shm/fuzzXXXXXX";
    if (::mkdtemp(made.data()) == nullptr || ::mkdir((made + "/checkpoint-4").c_str(), 0700) != 0) std::abort();
    return made;
  }();
  for (const char* const name : names) {
    const std::string_view content = input.substr(0, input.find('\0'));
    input.remove_prefix(std::min(input.size(), content.size() + 1));
    write_file(folder + "/" + name, content);
  }
  return folder;
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not true: %s\n", what);
  std::abort();
}

void safetensors(std::string_view input) {
  const format::SafetensorsFile file(file_with(input));
  for (const format::TensorEntry& entry : file.tensors()) {
    std::string into(16, '\0');
    if (entry.nbytes >= 16) file.read(entry, 0, std::as_writable_bytes(std::span(into)));
  }
}
/// Keys, tensors and blocks of a model's file.
void gguf(std::string_view input) {
  const std::string path = file_with(input);
  (void)format::gguf_config_json(format::GgufFile(path));
  const format::GgufWeights weights(path);
  for (const format::TensorEntry& entry : weights.tensors()) {
    std::string into(static_cast<size_t>(std::min<int64_t>(entry.nbytes, 64)), '\0');
    weights.read(entry, entry.nbytes - static_cast<int64_t>(into.size()), std::as_writable_bytes(std::span(into)));
  }
}
void header(std::string_view input) { (void)format::parse_safetensors_header(input, 64, "fuzz"); }
void config(std::string_view input) {
  const format::ModelConfig parsed = format::parse_model_config(input, "fuzz");
  expect(format::parameter_count(parsed) > 0, "a model has parameters");
}
void adapter(std::string_view input) {
  const format::AdapterConfig parsed = format::parse_adapter_config(input, "fuzz");
  const std::string text = format::adapter_config_json(parsed);
  expect(format::adapter_config_json(format::parse_adapter_config(text, "fuzz")) == text, "what is written is read");
}
void quant_state(std::string_view input) {
  const format::QuantState parsed = format::parse_quant_state(input, "fuzz");
  (void)format::parse_quant_state(format::quant_state_json(parsed), "fuzz");
}
/// A manifest with the checksum of its own text, which no change at random hits upon.
std::string sealed(std::string_view text) {
  constexpr format::PythonJsonStyle kStyle{.indent = 1};
  format::Json json = format::parse_json(text, "fuzz");
  if (!json.is_object()) return std::string(text);
  json.erase("sha256");
  const std::string body = format::dump_python_json(json, kStyle);
  files::Sha256 sum;
  sum.update(std::as_bytes(std::span(body)));
  json["sha256"] = sum.digest();
  return format::dump_python_json(json, kStyle) + "\n";
}
void manifest(std::string_view input) {
  const std::string text = sealed(input);
  const files::Manifest parsed = files::parse_manifest(text, "fuzz");
  expect(files::manifest_text(parsed) == text, "a manifest that is accepted is as it was written");
}
void index(std::string_view input) {
  using namespace std::string_literals;
  static const std::string shard = "\x38\0\0\0\0\0\0\0"s + R"({"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   )" + "ab";
  const std::string folder = folder_with(input.substr(0, input.find('\0')), {"model.safetensors.index.json"});
  static const int written = write_file(folder + "/model-1.safetensors", shard);
  (void)written;
  const format::TensorFiles files(folder);
}
/// run.json, a manifest and the run's state, each as it comes from the disk.
void run_folder(std::string_view input) {
  const size_t first = input.find('\0'), second = first == std::string_view::npos ? first : input.find('\0', first + 1);
  if (second == std::string_view::npos) return;
  const std::string manifest = sealed(input.substr(first + 1, second - first - 1));
  const std::string folder = folder_with(message("{}{}{}", input.substr(0, first + 1), manifest, input.substr(second)),
                                         {"run.json", "checkpoint-4/MANIFEST.json", "checkpoint-4/run_state.json"});
  const NewestCheckpoint newest = newest_checkpoint(folder);
  expect(!newest.path || newest.skipped.empty(), "the only checkpoint is whole or skipped");
}
void run_state(std::string_view input) {
  const RunStateReader reader(folder_with(input.substr(0, input.find('\0')), {"run_state.json"}));
  bool flag = false;
  uint32_t small = 0;
  uint64_t bits = 0;
  int64_t count = 0;
  double number = 0;
  std::string text;
  for (const char* key : {"epoch", "batch", "global_step", "ranks"}) reader.integer(key, count);
  expect(count >= 0, "a count is one");
  reader.integer("owes_save", flag);
  reader.integer("micro_step", small);
  reader.bits("seed", bits);
  reader.number("loss_sum", number);
  reader.text("device", text);
}
void gzip(std::string_view input) {
  ByteStream stream(file_with(input));
  std::string line;
  for (size_t total = 0; total < (1 << 20) && stream.take_line(line, 1 << 16); total += line.size() + 1) line.clear();
}
void json(std::string_view input) { (void)format::parse_json(input, "fuzz"); }
void tokenizer(std::string_view input) { (void)read_tokenizer_json(input, "fuzz"); }
void chat_template(std::string_view input) {
  static const std::vector<Message> kMessages{{"system", "s"}, {"user", "u"}, {"assistant", "<think>t</think>a"}};
  (void)ChatTemplate::from_source(input, {{"bos_token", "<s>"}, {"eos_token", "</s>"}}, "template")
      .render(kMessages, {.tools = R"([{"name": "f"}])", .served = true});
}
void rows(std::string_view input) {
  const FileFormat format =
      input.empty() ? FileFormat::kJson : static_cast<FileFormat>(1 + static_cast<unsigned char>(input.front()) % 5);
  (void)for_each_row(file_with(input.substr(input.empty() ? 0 : 1)), format, "text", [](const Row&, int64_t) {});
}

struct Target {
  std::string_view name;
  void (*run)(std::string_view);
};
constexpr Target kTargets[] = {{"safetensors", safetensors},
                               {"gguf", gguf},
                               {"header", header},
                               {"index", index},
                               {"config", config},
                               {"adapter", adapter},
                               {"quant_state", quant_state},
                               {"manifest", manifest},
                               {"run_folder", run_folder},
                               {"run_state", run_state},
                               {"json", json},
                               {"tokenizer", tokenizer},
                               {"template", chat_template},
                               {"rows", rows},
                               {"gzip", gzip}};

const Target& target() {
  const char* const name = std::getenv("FUZZ_TARGET");
  for (const Target& each : kTargets) {
    if (name != nullptr && each.name == name) return each;
  }
  std::fprintf(stderr, "FUZZ_TARGET must be one of");
  for (const Target& each : kTargets) std::fprintf(stderr, " %s", std::string(each.name).c_str());
  std::fprintf(stderr, "\n");
  std::exit(2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Target& chosen = target();
  try {
    chosen.run({reinterpret_cast<const char*>(data), size});
  } catch (const qlorapp::Error&) { return 0; }
  return 0;
}
