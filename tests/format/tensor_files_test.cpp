// SPDX-License-Identifier: Apache-2.0
#include "format/tensor_files.hpp"

#include <filesystem>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using namespace qlorapp::format;
namespace fs = std::filesystem;

namespace {

void write_shard(const std::string& path, const std::vector<std::string>& names) {
  std::vector<TensorSpec> specs;
  for (const std::string& name : names) specs.push_back({name, Dtype::kU8, {static_cast<int64_t>(name.size())}});
  write_safetensors(path, specs, {{"format", "pt"}}, [](const TensorEntry& entry) { return std::as_bytes(std::span(entry.name)); });
}

void write_index(const TemporaryFolder& folder, const std::string& map) {
  (void)folder.write("model.safetensors.index.json", R"({"metadata":{"total_size":1},"weight_map":)" + map + "}");
}

std::string index_refusal(const TemporaryFolder& folder) {
  return thrown<FormatError>([&] { TensorFiles files(folder.path()); });
}

}  // namespace

TEST_CASE("a single file and a sharded checkpoint give the same tensors by name", "[format][cpu]") {
  const TemporaryFolder single, sharded;
  write_shard(single / "model.safetensors", {"b", "a.x", "a.y"});
  write_shard(sharded / "model-00001-of-00002.safetensors", {"b", "a.y"});
  write_shard(sharded / "model-00002-of-00002.safetensors", {"a.x", "unlisted"});
  write_index(
      sharded,
      R"({"b":"model-00001-of-00002.safetensors","a.y":"model-00001-of-00002.safetensors","a.x":"model-00002-of-00002.safetensors"})");
  for (const TemporaryFolder* folder : {&single, &sharded}) {
    TensorFiles first(folder->path());
    const TensorFiles files = std::move(first);
    std::string names, prefixed, content(3, ' ');
    for (const TensorLocation& location : files.tensors()) names += location.tensor->name + " ";
    for (const TensorLocation& location : files.with_prefix("a.")) prefixed += location.tensor->name + " ";
    REQUIRE(names == "a.x a.y b ");
    REQUIRE(prefixed == "a.x a.y ");
    files.read("a.y", 0, std::as_writable_bytes(std::span(content)));
    REQUIRE(content == "a.y");
    REQUIRE(files.find("unlisted") == nullptr);
    REQUIRE(has(thrown<FormatError>([&] { (void)files.at("a.z"); }), "Did you mean 'a."));
  }
}

TEST_CASE("an index cannot lead out of its folder", "[format][cpu]") {
  const TemporaryFolder folder;
  const std::string outside = folder / "outside.safetensors";
  write_shard(outside, {"w"});
  fs::create_directories(folder / "model");
  for (const std::string& shard : std::vector<std::string>{
           "../outside.safetensors", outside, "./../outside.safetensors", "sub/x.safetensors", "..", ".", "", ".safetensors",
           "x.bin", "x.safetensors/", "a b.safetensors", "x\\u0000.safetensors", "~.safetensors", "\\u00e9.safetensors",
           "x.safetensors\\n", std::string(300, 'x') + ".safetensors"}) {
    (void)folder.write("model/model.safetensors.index.json", R"({"weight_map":{"w":")" + shard + "\"}}");
    INFO(shard);
    REQUIRE(has(thrown<FormatError>([&] { TensorFiles files(folder / "model"); }), "plain file name"));
  }
  fs::create_symlink("../outside.safetensors", folder / "model/link.safetensors");
  (void)folder.write("model/model.safetensors.index.json", R"({"weight_map":{"w":"link.safetensors"}})");
  REQUIRE(has(thrown<FormatError>([&] { TensorFiles files(folder / "model"); }), "it points to '../outside.safetensors'"));
  fs::create_symlink(outside, folder / "model/model.safetensors");
  REQUIRE(has(thrown<FormatError>([&] { TensorFiles files(folder / "model"); }), "../../blobs/<hex>"));
}

TEST_CASE("the Hugging Face cache's links are followed, one step and to a blob only", "[format][cpu]") {
  const TemporaryFolder cache;
  const std::string blob = "0123456789abcdef0123456789abcdef01234567";
  fs::create_directories(cache / "snapshots/rev");
  fs::create_directories(cache / "blobs");
  write_shard(cache / ("blobs/" + blob), {"w"});
  fs::create_symlink("../../blobs/" + blob, cache / "snapshots/rev/model.safetensors");
  REQUIRE(TensorFiles(cache / "snapshots/rev").find("w") != nullptr);
  fs::rename(cache / ("blobs/" + blob), cache / "secret");
  fs::create_symlink("../secret", cache / ("blobs/" + blob));
  REQUIRE(has(thrown<IoError>([&] { TensorFiles files(cache / "snapshots/rev"); }), "symbolic links"));
  for (const std::string target :
       {"../../blobs/", "../../blobs/../secret", "../../blobs/ABC", "../../blobs/a/b", "../../../blobs/ab"}) {
    fs::remove(cache / "snapshots/rev/model.safetensors");
    fs::create_symlink(target, cache / "snapshots/rev/model.safetensors");
    INFO(target);
    REQUIRE(has(thrown<FormatError>([&] { TensorFiles files(cache / "snapshots/rev"); }), "it points to"));
  }
}

TEST_CASE("each way in which shards and index disagree has one clear error", "[format][cpu]") {
  const TemporaryFolder folder;
  write_shard(folder / "1.safetensors", {"a", "b"});
  write_index(folder, R"({"a":"1.safetensors","c":"2.safetensors"})");
  REQUIRE(has(index_refusal(folder), "2.safetensors] the shard must exist"));
  write_shard(folder / "2.safetensors", {"d"});
  REQUIRE(has(index_refusal(folder), "2.safetensors] the shard must hold tensor 'c'"));
  write_shard(folder / "2.safetensors", {"b", "c"});
  REQUIRE(has(index_refusal(folder), "'b' is in"));
  write_shard(folder / "2.safetensors", {"c"});
  REQUIRE(index_refusal(folder) == "nothing");
  fs::resize_file(folder / "2.safetensors", fs::file_size(folder / "2.safetensors") - 1);
  REQUIRE(has(index_refusal(folder), "2.safetensors] incomplete metadata"));
  for (const char* map : {"{}", "[]", "null", R"("x")"}) {
    write_index(folder, map);
    REQUIRE(has(index_refusal(folder), "missing or empty"));
  }
  write_index(folder, R"({"a":1})");
  REQUIRE(has(index_refusal(folder), "plain file name"));
  write_index(folder, R"({"a":"1.safetensors","a":"2.safetensors"})");
  REQUIRE(has(index_refusal(folder), "'a' twice"));
  (void)folder.write("model.safetensors.index.json", "[]");
  REQUIRE(has(index_refusal(folder), "must be a JSON object"));
  (void)folder.write("model.safetensors.index.json", std::string(1000, '['));
  REQUIRE(has(index_refusal(folder), "nested"));
}

TEST_CASE("pickled weights are refused with the way to convert them", "[format][cpu]") {
  for (const char* name : {"pytorch_model.bin", "consolidated.00.pth", "model.pt"}) {
    const TemporaryFolder folder;
    REQUIRE(has(index_refusal(folder), "holds neither"));
    (void)folder.write(name, "PK\x03\x04");
    REQUIRE(has(index_refusal(folder), name));
    REQUIRE(has(index_refusal(folder), "save_pretrained"));
  }
  const TemporaryFolder folder;
  REQUIRE(has(thrown<IoError>([&] { TensorFiles files(folder / "none"); }), "must exist"));
  REQUIRE(has(thrown<FormatError>([&] { TensorFiles files(folder.write("file", "")); }), "must be a folder"));
}
