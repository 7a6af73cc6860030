// SPDX-License-Identifier: Apache-2.0
#include "format/tensor_files.hpp"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include <dirent.h>
#include <sys/stat.h>

#include "core/nearest_name.hpp"
#include "files/folder.hpp"
#include "format/gguf_folders.hpp"
#include "json/json_fields.hpp"

namespace qlorapp::format {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kSuffix = ".safetensors";
constexpr size_t kMaxShards = 10'000;

bool is_shard_name(std::string_view name) {
  if (!name.ends_with(kSuffix) || name.size() == kSuffix.size() || name.size() > 255) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
  });
}

/// Opens a file of the folder, or nothing if there is none of that name.
std::optional<files::FileReader> open_if_there(const std::string& folder, const std::string& name) {
  try {
    return files::FileReader::open_inside(folder, name);
  } catch (const IoError& error) {
    if (error.error_number() == ENOENT) return std::nullopt;
    throw;
  }
}

/// Says what the folder has instead.
[[noreturn]] void fail_without_safetensors(const std::string& folder) {
  std::string pickled, gguf;
  if (DIR* directory = ::opendir(folder.c_str())) {
    while (const dirent* entry = ::readdir(directory)) {
      const std::string_view name = entry->d_name;
      for (const std::string_view end : {".bin", ".pt", ".pth", ".ckpt", ".pkl"}) {
        if (name.ends_with(end)) pickled = name;
      }
      if (name.ends_with(".gguf")) gguf = name;
    }
    ::closedir(directory);
  }
  const std::string rule = message("[{}] a model folder must hold {} or {}; ", folder, kSingleFile, kIndexFile);
  if (!pickled.empty()) {
    throw FormatError(
        message("{}it holds {}, a pickled file that can run code when it is opened. Convert it once with transformers: "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder).",
                rule, printable(pickled)));
  }
  if (!gguf.empty()) throw FormatError(message("{}it holds {}. Give that file itself, as a model.", rule, printable(gguf)));
  throw FormatError(message("{}it holds neither. Check the path.", rule));
}

bool before(const TensorLocation& a, const TensorLocation& b) { return a.tensor->name < b.tensor->name; }

}  // namespace

bool TensorFiles::are_in(const std::string& folder) {
  return !gguf_of(folder).empty() || files::exists(files::path_in(folder, kSingleFile)) ||
         files::exists(files::path_in(folder, kIndexFile));
}

TensorFiles::TensorFiles(std::string folder) : folder_(std::move(folder)) {
  struct stat status {};
  if (::stat(folder_.c_str(), &status) != 0) {
    throw IoError(message("[{}] the model folder must exist; it does not. Check the path.", folder_), errno);
  }
  QLORAPP_CHECK_FORMAT(S_ISDIR(status.st_mode), "[{}] a model must be a folder; got a file. Name the folder that holds it.",
                       folder_);
  if (const std::string gguf = gguf_of(folder_); !gguf.empty()) {
    auto weights = std::make_unique<const GgufWeights>(gguf);
    gguf_ = weights.get();
    add_all(std::move(weights));
  } else if (auto single = open_if_there(folder_, kSingleFile)) {
    add_all(std::make_unique<const SafetensorsFile>(*std::move(single)));
  } else {
    open_index();
  }
}

void TensorFiles::add_all(std::unique_ptr<const TensorSource> file) {
  for (const TensorEntry& tensor : file->tensors()) tensors_.push_back({file.get(), &tensor});
  std::sort(tensors_.begin(), tensors_.end(), before);
  files_.push_back(std::move(file));
}

void TensorFiles::open_index() {
  const std::optional<files::FileReader> index = open_if_there(folder_, kIndexFile);
  if (!index) fail_without_safetensors(folder_);
  constexpr size_t kMaxIndexBytes = size_t{128} << 20;
  const std::string& where = index->path();
  const Json json = parse_json(index->read_all(kMaxIndexBytes), where, {.max_bytes = kMaxIndexBytes, .max_depth = 4});
  JsonFields fields(json, where);
  const Json* map = fields.value("weight_map");
  QLORAPP_CHECK_FORMAT(map != nullptr && map->is_object() && !map->empty(),
                       "[{}] weight_map must name a shard for each tensor; it is missing or empty. Save the model again.", where);
  std::vector<std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    QLORAPP_CHECK_FORMAT(
        shard.is_string() && is_shard_name(shard.get_ref<const std::string&>()),
        "[{}] a shard must be a plain file name [A-Za-z0-9._-]+.safetensors; tensor {} has {}. Do not use this checkpoint.", where,
        printable(tensor), shown(shard));
    shards.push_back(shard.get<std::string>());
  }
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  QLORAPP_CHECK_FORMAT(shards.size() <= kMaxShards, "[{}] a checkpoint may have at most {} shards; got {}.", where, kMaxShards,
                       shards.size());
  std::vector<const SafetensorsFile*> opened;
  for (const std::string& shard : shards) {
    auto file = open_if_there(folder_, shard);
    QLORAPP_CHECK_FORMAT(file.has_value(),
                         "[{}/{}] the shard must exist, because {} names it; it is missing. Download the checkpoint again.",
                         folder_, shard, kIndexFile);
    auto own = std::make_unique<const SafetensorsFile>(*std::move(file));
    opened.push_back(own.get());
    files_.push_back(std::move(own));
  }

  std::vector<TensorLocation> all;
  for (const auto& file : files_) {
    for (const TensorEntry& tensor : file->tensors()) all.push_back({file.get(), &tensor});
  }
  std::sort(all.begin(), all.end(), before);
  const auto twice =
      std::adjacent_find(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.tensor->name == b.tensor->name; });
  if (twice != all.end()) {
    throw FormatError(message("[{}] a tensor must be in one shard; {} is in {} and {}. Save the model again.", folder_,
                              printable(twice->tensor->name), twice->file->path(), (twice + 1)->file->path()));
  }
  for (const auto& [name, shard] : map->items()) {
    const auto file = std::lower_bound(shards.begin(), shards.end(), shard.get_ref<const std::string&>()) - shards.begin();
    const SafetensorsFile& holder = *opened[static_cast<size_t>(file)];
    const TensorEntry* tensor = holder.find(name);
    QLORAPP_CHECK_FORMAT(tensor != nullptr,
                         "[{}] the shard must hold tensor {}, because {} says so; it does not. Download the checkpoint again.",
                         holder.path(), printable(name), kIndexFile);
    tensors_.push_back({&holder, tensor});
  }
  std::sort(tensors_.begin(), tensors_.end(), before);
}

std::span<const TensorLocation> TensorFiles::with_prefix(std::string_view prefix) const {
  const auto first = std::lower_bound(tensors_.begin(), tensors_.end(), prefix,
                                      [](const auto& t, std::string_view p) { return t.tensor->name < p; });
  auto last = first;
  while (last != tensors_.end() && last->tensor->name.starts_with(prefix)) ++last;
  return {first, last};
}

const TensorLocation* TensorFiles::find(std::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const auto& t, std::string_view n) { return t.tensor->name < n; });
  return found != tensors_.end() && found->tensor->name == name ? &*found : nullptr;
}

const TensorLocation& TensorFiles::at(std::string_view name) const {
  if (const TensorLocation* location = find(name)) return *location;
  std::vector<std::string_view> known;
  if (tensors_.size() <= 10'000) {
    for (const TensorLocation& location : tensors_) known.push_back(location.tensor->name);
  }
  throw FormatError(
      message("[{}] the checkpoint must hold tensor {}; it does not.{}", folder_, printable(name), did_you_mean(name, known)));
}

const StoredBlocks* TensorFiles::blocks_of(std::string_view name) const {
  const TensorLocation* const found = gguf_ == nullptr ? nullptr : find(name);
  return found == nullptr ? nullptr : gguf_->blocks_of(*found->tensor);
}

void TensorFiles::rename(const std::function<std::string(const std::string&)>& name_of) {
  for (TensorLocation& location : tensors_) {
    std::string now = name_of(location.tensor->name);
    if (now == location.tensor->name) continue;
    renamed_.push_back(std::make_unique<TensorEntry>(*location.tensor));
    renamed_.back()->name = std::move(now);
    location.tensor = renamed_.back().get();
  }
  std::sort(tensors_.begin(), tensors_.end(), before);
  const auto twice = std::adjacent_find(tensors_.begin(), tensors_.end(),
                                        [](const auto& a, const auto& b) { return a.tensor->name == b.tensor->name; });
  QLORAPP_CHECK_FORMAT(twice == tensors_.end(),
                       "[{}] a tensor must be there once; {} is there under two names. Save the model again.", folder_,
                       printable(twice == tensors_.end() ? "" : twice->tensor->name));
}

void TensorFiles::read(std::string_view name, int64_t offset, std::span<std::byte> into) const {
  const TensorLocation& location = at(name);
  location.file->read(*location.tensor, offset, into);
}

}  // namespace qlorapp::format
