// SPDX-License-Identifier: Apache-2.0
#include "files/manifest.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/checksum.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"

namespace qlorapp::files {
namespace {

using format::Json;
using format::JsonFields;

constexpr int64_t kSchema = 1;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr size_t kMostBytes = size_t{64} << 20;
constexpr size_t kMostDepth = 8;  // folders inside each other

std::string hexadecimal(uint32_t value) {
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08x", value);
  return text.data();
}

bool is_hexadecimal(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void list_files(const std::string& folder, const std::string& prefix, size_t depth, std::vector<std::string>& names) {
  QLORAPP_CHECK_FORMAT(depth <= kMostDepth, "[{}] folders may lie at most {} deep in a checkpoint.", folder, kMostDepth);
  for (const std::string& entry : names_in(folder)) {
    const std::string path = path_in(folder, entry), name = prefix + entry;
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) throw IoError(message("[{}] cannot be read: {}.", path, std::strerror(errno)), errno);
    if (S_ISDIR(status.st_mode)) {
      list_files(path, name + "/", depth + 1, names);
    } else {
      QLORAPP_CHECK_FORMAT(S_ISREG(status.st_mode), "[{}] a checkpoint holds regular files only. Remove it.", path);
      if (name != kManifestName) names.push_back(name);
    }
  }
}

ManifestFile describe(const std::string& folder, const std::string& name) {
  const FileReader file = FileReader::open_inside(path_in(folder, name));
  ManifestFile found{name, file.size(), {}, {}};
  std::vector<std::byte> chunk(static_cast<size_t>(std::min(kManifestChunk, file.size())));
  Sha256 whole;
  for (int64_t at = 0; at < file.size(); at += kManifestChunk) {
    const auto part = std::span(chunk).first(static_cast<size_t>(std::min(kManifestChunk, file.size() - at)));
    file.read_at(at, part);
    whole.update(part);
    found.crc32c.push_back(crc32c(part));
  }
  found.sha256 = whole.digest();
  return found;
}

Json to_json(const Manifest& manifest) {
  Json files = Json::object();
  for (const ManifestFile& file : manifest.files) {
    Json crc = Json::array();
    for (const uint32_t value : file.crc32c) crc.push_back(hexadecimal(value));
    files[file.name] = {{"size", file.size}, {"sha256", file.sha256}, {"crc32c", std::move(crc)}};
  }
  if (manifest.kind == kOutputKind) return {{"schema", kSchema}, {"kind", manifest.kind}, {"files", std::move(files)}};
  return {{"schema", kSchema},     {"kind", manifest.kind},     {"run_id", manifest.run_id},
          {"step", manifest.step}, {"parent", manifest.parent}, {"files", std::move(files)}};
}

constexpr format::PythonJsonStyle kStyle{.indent = 1};

std::string checksum(const std::string& text) {
  Sha256 sum;
  sum.update(std::as_bytes(std::span(text)));
  return sum.digest();
}

ManifestFile parse_file(const std::string& name, const Json& json, const std::string& where) {
  QLORAPP_CHECK_FORMAT(is_name_inside(name) && name != kManifestName, "[{}] {} must be the path of a file inside the folder.",
                       where, printable(name));
  JsonFields fields(json, where, "files." + printable(name) + ".");
  ManifestFile file{name, fields.integer("size", 0, kMost).value_or(-1), fields.text("sha256").value_or(""), {}};
  const Json* const crc = fields.value("crc32c");
  const int64_t chunks = (file.size + kManifestChunk - 1) / kManifestChunk;
  bool is_right =
      file.size >= 0 && is_hexadecimal(file.sha256, 64) && crc != nullptr && crc->is_array() && std::ssize(*crc) == chunks;
  for (size_t i = 0; is_right && i < crc->size(); ++i) {
    const auto* const text = (*crc)[i].get_ptr<const std::string*>();
    is_right = text != nullptr && is_hexadecimal(*text, 8);
    if (is_right) std::from_chars(text->data(), text->data() + 8, file.crc32c.emplace_back(), 16);
  }
  QLORAPP_CHECK_FORMAT(is_right, "[{}] {} must have a size, a sha256 and a crc32c for each 4 MiB.", where, printable(name));
  return file;
}

}  // namespace

std::vector<ManifestFile> flush_and_describe(const std::string& folder) {
  std::vector<std::string> names;
  list_files(folder, "", 1, names);
  std::sort(names.begin(), names.end());
  std::vector<ManifestFile> files;
  for (const std::string& name : names) files.push_back(describe(folder, name));
  flush_tree(folder);
  return files;
}

std::string manifest_text(const Manifest& manifest) {
  Json json = to_json(manifest);
  const std::string sum = checksum(format::dump_python_json(json, kStyle));
  json["sha256"] = sum;
  return format::dump_python_json(json, kStyle) + "\n";
}

std::optional<std::string> output_manifest(const std::string& folder, const std::string& from,
                                           const std::vector<std::string>& names, const std::vector<std::string>& retired) {
  Manifest manifest{std::string(kOutputKind), {}, {}, 0, {}};
  if (has_entry(folder, kManifestName)) {
    try {
      Manifest old = read_manifest(folder);
      if (old.kind != kOutputKind) return std::nullopt;
      manifest.files = std::move(old.files);
    } catch (const FormatError&) {}  // damaged: what it says is lost
  }
  const auto is_text = [](const std::string& name) {
    try {
      std::string written;
      format::append_json_string(written, name, true);
      return true;
    } catch (const ValueError&) { return false; }
  };
  for (const std::string& name : names) {
    std::erase_if(manifest.files, [&](const ManifestFile& file) { return file.name == name; });
    if (name != kManifestName && is_text(name)) manifest.files.push_back(describe(from, name));
  }
  const auto is_in = [](const std::string& name, const std::vector<std::string>& list) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  std::erase_if(manifest.files, [&](const ManifestFile& file) {
    return !is_in(file.name, names) && (is_in(file.name, retired) || !has_entry(folder, file.name));
  });
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const ManifestFile& a, const ManifestFile& b) { return a.name < b.name; });
  return manifest_text(manifest);
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const Json json = format::parse_json(text, where, {.max_bytes = kMostBytes, .max_depth = 4});
  JsonFields fields(json, where);
  const int64_t schema = fields.integer("schema", 0, kMost).value_or(0);
  QLORAPP_CHECK_FORMAT(schema == kSchema, "[{}] has schema {}; this version reads {}. Use the version that wrote it.", where,
                       schema, kSchema);
  Manifest manifest{fields.text("kind").value_or(""),
                    fields.text("run_id").value_or(""),
                    fields.text("parent").value_or(""),
                    fields.integer("step", 0, kMost).value_or(-1),
                    {}};
  const bool is_output = manifest.kind == kOutputKind;
  if (is_output) manifest.step = 0;
  QLORAPP_CHECK_FORMAT(is_output || (is_hexadecimal(manifest.run_id, 32) && manifest.step >= 0),
                       "[{}] must have a run_id and a step.", where);
  const Json* const files = fields.value("files");
  QLORAPP_CHECK_FORMAT(files != nullptr && files->is_object(), "[{}] must have an object 'files'.", where);
  for (const auto& [name, file] : files->items()) manifest.files.push_back(parse_file(name, file, where));
  QLORAPP_CHECK_FORMAT(manifest_text(manifest) == text, "[{}] was changed after it was written: its sha256 does not fit.", where);
  return manifest;
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = path_in(folder, kManifestName);
  QLORAPP_CHECK_FORMAT(exists(path), "[{}] has no {}: it was never finished, or the file was removed.", folder, kManifestName);
  return parse_manifest(FileReader::open_inside(path).read_all(kMostBytes), path);
}

std::vector<std::string> damage(const std::string& folder, const Manifest& manifest) {
  std::vector<std::string> lines;
  for (const ManifestFile& wanted : manifest.files) {
    // The Hugging Face cache links the files of an output to its blobs, which FileReader follows.
    const bool may_be_linked = manifest.kind == kOutputKind && is_regular_file(path_in(folder, wanted.name));
    ManifestFile found;
    try {
      if (may_be_linked || is_plain_file(folder, wanted.name)) found = describe(folder, wanted.name);
    } catch (const FormatError&) {}  // a link to elsewhere
    if (found.name.empty()) {
      lines.push_back(
          message("{}: it is {}", wanted.name, exists(path_in(folder, wanted.name)) ? "a link, or no regular file" : "missing"));
      continue;
    }
    if (found.size != wanted.size) {
      lines.push_back(message("{}: it has {} bytes and was written with {}", wanted.name, found.size, wanted.size));
    } else if (found.sha256 != wanted.sha256) {
      const auto chunk =
          std::mismatch(found.crc32c.begin(), found.crc32c.end(), wanted.crc32c.begin()).first - found.crc32c.begin();
      lines.push_back(message("{}: its bytes from {} on were changed", wanted.name,
                              std::min<int64_t>(chunk, std::ssize(found.crc32c) - 1) * kManifestChunk));
    }
  }
  return lines;
}

}  // namespace qlorapp::files
