// SPDX-License-Identifier: Apache-2.0
#include "format/read_ahead.hpp"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/faulty_calls.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

constexpr size_t kStep = ReadAhead::kBufferStep;

/// A folder of two shards with tensors of all sizes between nothing and several buffers, filled with noise.
struct Shards {
  TemporaryFolder folder;
  std::map<std::string, std::string> content;

  Shards() {
    uint32_t state = 1;
    std::string map = "{";
    for (int shard = 0; shard < 2; ++shard) {
      std::vector<TensorSpec> specs;
      for (const int64_t size :
           {int64_t{0}, int64_t{1}, int64_t{300}, int64_t{16383}, int64_t{16384}, int64_t{16385}, int64_t{100'001}}) {
        const std::string name = message("tensor{}.{}", shard, size);
        specs.push_back({name, Dtype::kU8, {size}});
        std::string& bytes = content[name];
        for (int64_t i = 0; i < size; ++i) bytes += static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
        map += message("{}\"{}\":\"s{}.safetensors\"", map.size() > 1 ? "," : "", name, shard);
      }
      write_safetensors(folder / message("s{}.safetensors", shard), specs, {},
                        [&](const TensorEntry& entry) { return std::as_bytes(std::span(content[entry.name])); });
    }
    (void)folder.write("model.safetensors.index.json", R"({"weight_map":)" + map + "}}");
  }
};

std::vector<TensorLocation> all_of(const TensorFiles& files) {
  std::vector<TensorLocation> tensors;
  for (const auto& file : files.files()) {
    for (const TensorEntry& tensor : file->tensors()) tensors.push_back({file.get(), &tensor});
  }
  return tensors;
}

struct Ring {
  Ring(size_t count, size_t bytes) : memory(count, std::vector<std::byte>(bytes)) {}
  [[nodiscard]] std::vector<std::span<std::byte>> spans() { return {memory.begin(), memory.end()}; }
  std::vector<std::vector<std::byte>> memory;
};

/// Reads on until the end or an error; what has come of each tensor.
std::vector<std::string> drain(ReadAhead& reader, const Ring& ring, size_t tensors) {
  std::vector<std::string> arrived(tensors);
  while (const auto batch = reader.next()) {
    for (const ReadAhead::Piece& piece : batch->pieces) {
      REQUIRE(static_cast<int64_t>(arrived[piece.tensor].size()) == piece.offset);  // in order
      REQUIRE(piece.at % ReadAhead::kAlignment == 0);
      const auto* from = reinterpret_cast<const char*>(ring.memory[batch->buffer].data() + piece.at);
      arrived[piece.tensor].append(from, static_cast<size_t>(piece.nbytes));
    }
    reader.release(batch->buffer);
  }
  return arrived;
}

}  // namespace

TEST_CASE("the bytes that arrive are the files', whatever the number of threads and buffers and however short the reads",
          "[format][cpu]") {
  const Shards shards;
  const TensorFiles files(shards.folder.path());
  const auto tensors = all_of(files);
  for (const int threads : {1, 2, 7}) {
    for (const size_t buffers : {1, 3, 16}) {
      for (const size_t bytes : {kStep, 3 * kStep, 20 * kStep}) {
        const WithFaultyCalls faults({.call = "pread", .error = EINTR, .after = 5, .once = true, .most = 7001});
        Ring ring(buffers, bytes);
        ReadAhead reader(tensors, ring.spans(), threads);
        const auto arrived = drain(reader, ring, tensors.size());
        for (size_t i = 0; i < tensors.size(); ++i) REQUIRE(arrived[i] == shards.content.at(tensors[i].tensor->name));
        REQUIRE_FALSE(reader.next().has_value());
      }
    }
  }
}

TEST_CASE("nothing is read ahead into buffers that the caller holds", "[format][cpu]") {
  const Shards shards;
  const TensorFiles files(shards.folder.path());
  Ring ring(3, kStep);
  ReadAhead reader(all_of(files), ring.spans(), 8);
  std::vector<size_t> held;
  for (int i = 0; i < 3; ++i) held.push_back(reader.next()->buffer);
  std::sort(held.begin(), held.end());
  REQUIRE(held == std::vector<size_t>{0, 1, 2});
  REQUIRE_FALSE(reader.ready());
  reader.release(held[1]);
  REQUIRE(reader.next()->buffer == held[1]);
}  // and an abandoned reader ends here

TEST_CASE("an error of a reading thread comes in its turn, naming the file and the tensor", "[format][cpu]") {
  const Shards shards;
  const TensorFiles files(shards.folder.path());
  const auto tensors = all_of(files);
  for (const int threads : {1, 4}) {
    const WithFaultyCalls faults({.call = "pread", .error = EIO, .after = 6});
    Ring ring(4, kStep);
    ReadAhead reader(tensors, ring.spans(), threads);
    const std::string message = thrown<IoError>([&] { (void)drain(reader, ring, tensors.size()); });
    REQUIRE(has(message, "s0.safetensors"));
    REQUIRE(has(message, "'tensor0."));
    REQUIRE(has(message, "reading failed"));
    REQUIRE(thrown<IoError>([&] { (void)reader.next(); }) == message);  // it stays
  }
}

TEST_CASE("a file that shrinks or changes after it was opened is refused", "[format][cpu]") {
  const Shards shards;
  const std::string path = shards.folder / "s1.safetensors";
  const TensorFiles files(shards.folder.path());
  const auto tensors = all_of(files);
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
  {
    Ring ring(4, kStep);
    ReadAhead reader(tensors, ring.spans(), 2);
    const std::string message = thrown<FormatError>([&] { (void)drain(reader, ring, tensors.size()); });
    REQUIRE(has(message, "s1.safetensors"));
    REQUIRE(has(message, "must not change"));
  }
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 50'000);
  Ring ring(4, kStep);
  ReadAhead reader(tensors, ring.spans(), 2);
  const std::string message = thrown<FormatError>([&] { (void)drain(reader, ring, tensors.size()); });
  REQUIRE(has(message, "s1.safetensors"));
  REQUIRE(has(message, "truncated"));
  REQUIRE(has(message, "'tensor1."));
}

TEST_CASE("a ring that cannot work is refused", "[format][cpu]") {
  const Shards shards;
  const TensorFiles files(shards.folder.path());
  Ring odd(1, kStep + 1), good(1, kStep);
  REQUIRE(has(thrown<ValueError>([&] { ReadAhead reader(all_of(files), odd.spans(), 1); }), "multiple of"));
  REQUIRE(has(thrown<ValueError>([&] { ReadAhead reader(all_of(files), {}, 1); }), "one buffer and one thread"));
  REQUIRE(has(thrown<ValueError>([&] { ReadAhead reader(all_of(files), good.spans(), 0); }), "one buffer and one thread"));
  ReadAhead nothing({}, good.spans(), 2);
  REQUIRE(nothing.ready());
  REQUIRE_FALSE(nothing.next().has_value());
}
