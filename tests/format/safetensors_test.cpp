// SPDX-License-Identifier: Apache-2.0
// The hostile corpus: every way in which a header can lie, each with the one message that fits it.
#include "format/safetensors.hpp"

#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "files/faulty_calls.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

std::string length_prefix(uint64_t length) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) bytes += static_cast<char>((length >> shift) & 0xff);
  return bytes;
}

std::string file_of(const std::string& header, size_t data_bytes = 0) {
  return length_prefix(header.size()) + header + std::string(data_bytes, '\0');
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

std::string file_refusal(const std::string& content) {
  const TemporaryFolder folder;
  const std::string path = folder.write("hostile.safetensors", content);
  const std::string message = thrown<FormatError>([&] { SafetensorsFile file(path); });
  if (message != "nothing") REQUIRE(has(message, path));
  return message;
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

}  // namespace

TEST_CASE("each rule of the format has its own refusal", "[format][cpu]") {
  const std::string good = tensor("a", "F32", "[2]", "[0,8]");
  const struct {
    const char* name;
    std::string content, reason;
  } rows[] = {
      {"empty file", "", "header too small"},
      {"seven bytes", std::string(7, '\0'), "header too small"},
      {"length beyond the limit", length_prefix(100'000'001) + std::string(100, ' '), "header too large"},
      {"length 2^64-1", length_prefix(~uint64_t{0}) + "{}", "header too large"},
      {"a zip archive", "PK\x03\x04" + std::string(60, 'x'), "header too large"},
      {"length beyond the file", length_prefix(1000) + "{}", "invalid header length"},
      {"length one beyond the file", length_prefix(3) + "{}", "invalid header length"},
      {"empty header", length_prefix(0), "invalid JSON"},
      {"not UTF-8", file_of("{\"\xff\xff\":{}}"), "invalid UTF-8"},
      {"not JSON", file_of("{\"a"), "invalid JSON"},
      {"an array", file_of("[]"), "invalid JSON"},
      {"a number", file_of("1"), "invalid JSON"},
      {"two values", file_of("{}{}"), "invalid JSON"},
      {"NUL behind the value", file_of(std::string("{}\0\0", 4)), "NUL"},
      {"NUL and a second header", file_of(std::string("{}\0{}", 5)), "NUL"},
      {"unknown dtype", file_of("{" + tensor("a", "F128", "[1]", "[0,16]") + "}", 16), "unknown dtype 'F128'"},
      {"lower-case dtype", file_of("{" + tensor("a", "f32", "[2]", "[0,8]") + "}", 8), "unknown dtype"},
      {"negative size", file_of("{" + tensor("a", "F32", "[-2]", "[0,8]") + "}", 8), "invalid JSON"},
      {"minus zero", file_of("{" + tensor("a", "F32", "[-0]", "[0,0]") + "}"), "invalid JSON"},
      {"float size", file_of("{" + tensor("a", "F32", "[2.0]", "[0,8]") + "}", 8), "invalid JSON"},
      {"size beyond 64 bits", file_of("{" + tensor("a", "F32", "[18446744073709551616]", "[0,8]") + "}", 8), "64-bit"},
      {"string size", file_of("{" + tensor("a", "F32", "[\"2\"]", "[0,8]") + "}", 8), "invalid JSON"},
      {"null shape", file_of("{" + tensor("a", "F32", "null", "[0,8]") + "}", 8), "invalid JSON"},
      {"number as shape", file_of("{" + tensor("a", "F32", "2", "[0,8]") + "}", 8), "invalid JSON"},
      {"nested shape", file_of("{" + tensor("a", "F32", "[[2]]", "[0,8]") + "}", 8), "an array"},
      {"deep nesting", file_of("{\"a\":" + std::string(100'000, '[')), "invalid JSON"},
      {"one offset", file_of("{" + tensor("a", "F32", "[2]", "[8]") + "}", 8), "two numbers"},
      {"three offsets", file_of("{" + tensor("a", "F32", "[2]", "[0,8,8]") + "}", 8), "two numbers"},
      {"no shape", file_of(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8), "lacks one"},
      {"empty tensor", file_of(R"({"a":{}})"), "lacks one"},
      {"tensor null", file_of(R"({"a":null})"), "null"},
      {"metadata number", file_of(R"({"__metadata__":{"a":1}})"), "a number"},
      {"metadata nested", file_of(R"({"__metadata__":{"a":{}}})"), "an object"},
      {"metadata null", file_of(R"({"__metadata__":null})"), "null"},
      {"metadata string", file_of(R"({"__metadata__":"x"})"), "a string"},
      {"name twice, same range", file_of("{" + good + "," + good + "}", 8), ""},
      {"empty name twice", file_of("{" + tensor("e", "F32", "[0]", "[0,0]") + "," + tensor("e", "F32", "[0]", "[0,0]") + "}"),
       "'e' twice"},
      {"name twice, ranges in a row", file_of("{" + good + "," + tensor("a", "F32", "[2]", "[8,16]") + "}", 16), "'a' twice"},
      {"name twice by escape", file_of("{" + good + "," + tensor("\\u0061", "F32", "[2]", "[8,16]") + "}", 16), "'a' twice"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})"), "twice"},
      {"metadata key twice", file_of(R"({"__metadata__":{"a":"1","a":"2"}})"), "unique"},
      {"dtype twice", file_of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8), "dtype twice"},
      {"shape twice", file_of(R"({"a":{"dtype":"F32","shape":[9],"shape":[2],"data_offsets":[0,8]}})", 8), "shape twice"},
      {"unknown field", file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8), "unknown field 'x'"},
      {"range not from 0", file_of("{" + tensor("a", "F32", "[2]", "[8,16]") + "}", 16), "invalid offset for tensor 'a'"},
      {"hole", file_of("{" + good + "," + tensor("b", "F32", "[1]", "[12,16]") + "}", 16), "invalid offset for tensor 'b'"},
      {"overlap", file_of("{" + good + "," + tensor("b", "F32", "[2]", "[4,12]") + "}", 12), "invalid offset for tensor 'b'"},
      {"backward range", file_of("{" + tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "F32", "[0]", "[8,4]") + "}", 8),
       "invalid offset"},
      {"ten tensors on one range",
       file_of(
           [] {
             std::string header = "{";
             for (int i = 0; i < 10; ++i) header += (i == 0 ? "" : ",") + tensor("w" + std::to_string(i), "F32", "[2,2]", "[0,16]");
             return header + "}";
           }(),
           16),
       "invalid offset"},
      {"elements overflow", file_of("{" + tensor("a", "F32", "[4294967296,4294967296]", "[0,8]") + "}", 8), "overflows"},
      {"bits overflow", file_of("{" + tensor("a", "F64", "[1152921504606846976]", "[0,8]") + "}", 8), "overflows"},
      {"overflow before a zero", file_of("{" + tensor("a", "U8", "[9223372036854775807,2,0]", "[0,0]") + "}"), "overflows"},
      {"half a byte", file_of("{" + tensor("a", "F4", "[3]", "[0,2]") + "}", 2), "whole bytes"},
      {"three quarters of a byte", file_of("{" + tensor("a", "F6_E2M3", "[1]", "[0,1]") + "}", 1), "whole bytes"},
      {"too long a range", file_of("{" + tensor("a", "F32", "[1]", "[0,8]") + "}", 8), "invalid shape, data type, or offset"},
      {"too short a range", file_of("{" + tensor("a", "F32", "[3]", "[0,8]") + "}", 8), "invalid shape, data type, or offset"},
      {"end beyond int64", file_of("{" + tensor("a", "F32", "[2]", "[0,18446744073709551615]") + "}", 8), "64-bit"},
      {"one byte missing", file_of("{" + good + "}", 7), "truncated"},
      {"all data missing", file_of("{" + good + "}", 0), "truncated"},
      {"one byte behind", file_of("{" + good + "}", 9), "after its tensors"},
      {"a second archive behind", file_of("{" + good + "}", 8) + "PK\x05\x06", "not fully covered"},
      {"long name", file_of("{" + tensor(std::string(4097, 'n'), "U8", "[0]", "[0,0]") + "}"), "4096 bytes"},
      {"rank 65",
       file_of("{" +
                   tensor(
                       "a", "U8",
                       "[1" +
                           [] {
                             std::string s;
                             for (int i = 0; i < 64; ++i) s += ",1";
                             return s;
                           }() +
                           "]",
                       "[0,1]") +
                   "}",
               1),
       "64 dimensions"},
  };
  for (const auto& row : rows) {
    const std::string message = file_refusal(row.content);
    INFO(row.name << ": " << message);
    REQUIRE(message != "nothing");
    REQUIRE(has(message, row.reason));
    REQUIRE(message.size() < 800);
    REQUIRE(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("every byte flipped and every truncation of a small file is refused or leaves the same sizes", "[format][cpu]") {
  const std::string header = "{" + tensor("abc", "F16", "[2,3]", "[0,12]") + "}";
  const std::string content = file_of(header, 12);
  for (size_t size = 0; size < content.size(); ++size) REQUIRE(file_refusal(content.substr(0, size)) != "nothing");
  const TemporaryFolder folder;
  for (size_t i = 0; i < 8 + header.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = content;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      const std::string path = folder.write("flipped", flipped);
      try {
        const SafetensorsFile file(path);
        REQUIRE(file.tensors().size() == 1);
        REQUIRE(file.tensors()[0].nbytes == 12);  // another name, another 16-bit type or 3x2: still within the file
      } catch (const FormatError&) {}
    }
  }
}

TEST_CASE("what the format allows is read: scalars, empty tensors, white space, all 22 dtypes", "[format][cpu]") {
  REQUIRE(file_refusal(file_of("{}")) == "nothing");
  REQUIRE(file_refusal(file_of("{}      ")) == "nothing");
  REQUIRE(file_refusal(file_of(" \t\r\n{ } ")) == "nothing");
  REQUIRE(file_refusal(file_of(R"({"__metadata__":{}})")) == "nothing");
  REQUIRE(file_refusal(file_of("{" + tensor("s", "F32", "[]", "[0,4]") + "," + tensor("e", "I64", "[0,5]", "[4,4]") + "," +
                                   tensor("z", "I64", "[7,0]", "[4,4]") + "}",
                               4)) == "nothing");
  REQUIRE(file_refusal(file_of("{" + tensor("f4", "F4", "[2]", "[0,1]") + "," + tensor("f6", "F6_E3M2", "[4]", "[1,4]") + "}",
                               4)) == "nothing");
  for (int i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    REQUIRE(dtype_from_name(dtype_name(dtype)) == dtype);
    const std::string bytes = std::to_string(dtype_bits(dtype));
    REQUIRE(file_refusal(file_of("{" + tensor("a", std::string(dtype_name(dtype)), "[8]", "[0," + bytes + "]") + "}",
                                 static_cast<size_t>(dtype_bits(dtype)))) == "nothing");
  }
}

TEST_CASE("a million tensors are the most that a file may hold", "[format][cpu]") {
  std::string header = "{";
  for (int i = 0; i <= 1'000'000; ++i)
    header += message(R"({}{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", i == 0 ? "\"" : ",\"", i);
  REQUIRE(has(file_refusal(file_of(header + "}")), "1000000 tensors"));
}

TEST_CASE("a directory, a pipe and a missing file are said to be just that", "[format][cpu]") {
  const TemporaryFolder folder;
  REQUIRE(has(thrown<FormatError>([&] { SafetensorsFile file(folder.path()); }), "folder"));
  REQUIRE(has(thrown<FormatError>([&] { SafetensorsFile file("/dev/null"); }), "pipe or device"));
  REQUIRE(has(thrown<IoError>([&] { SafetensorsFile file(folder / "none"); }), "No such file"));
}

TEST_CASE("reads stay within the tensor, continue after interruptions and notice a file that shrank", "[format][cpu]") {
  const TemporaryFolder folder;
  const std::string path =
      folder.write("a.safetensors",
                   file_of("{" + tensor("x", "U8", "[3]", "[0,3]") + "," + tensor("y", "U8", "[5]", "[3,8]") + "}") + "abcdefgh");
  const SafetensorsFile file(path);
  std::array<std::byte, 5> into{};
  {
    const WithFaultyCalls faults({.call = "pread", .error = EINTR, .after = 2, .once = true, .most = 1});
    file.read("y", 0, into);
  }
  REQUIRE(std::string_view(reinterpret_cast<const char*>(into.data()), 5) == "defgh");
  file.read("y", 3, std::span(into).first(2));
  REQUIRE(static_cast<char>(into[0]) == 'g');
  file.read("x", 3, std::span(into).first(0));
  REQUIRE(has(thrown<ValueError>([&] { file.read("x", 0, into); }), "within tensor 'x'"));
  REQUIRE(has(thrown<ValueError>([&] { file.read("x", -1, std::span(into).first(1)); }), "within"));
  REQUIRE(has(thrown<ValueError>([&] { file.read("x", 4, std::span(into).first(0)); }), "within"));
  REQUIRE(has(thrown<FormatError>([&] { (void)file.at("z"); }), "must hold tensor 'z'"));
  {
    const WithFaultyCalls faults({.call = "pread", .error = EIO});
    REQUIRE(has(thrown<IoError>([&] { file.read("y", 0, into); }), "reading failed"));
  }
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 2);
  REQUIRE(has(thrown<FormatError>([&] { file.read("y", 0, into); }), "truncated"));
}

TEST_CASE("the writer's bytes are those of the format's description", "[format][cpu]") {
  const TemporaryFolder folder;
  const std::string f32(8, 'f'), u8(3, 'u'), i64(8, 'i');
  write_safetensors(
      folder / "out",
      {{"b", Dtype::kU8, {3}}, {"z\"\n\xc3\xa9", Dtype::kF32, {1, 2}}, {"i", Dtype::kI64, {}}, {"a", Dtype::kU8, {0}}},
      {{"format", "pt"}, {"a", "1"}}, [&](const TensorEntry& entry) {
        return entry.dtype == Dtype::kF32   ? bytes_of(f32)
               : entry.dtype == Dtype::kI64 ? bytes_of(i64)
                                            : bytes_of(u8).first(static_cast<size_t>(entry.nbytes));
      });
  std::string header = R"({"__metadata__":{"a":"1","format":"pt"},"i":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)";
  header += "\"z\\\"\\n\xc3\xa9\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[8,16]},";
  header += R"("a":{"dtype":"U8","shape":[0],"data_offsets":[16,16]},"b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  REQUIRE(folder.read("out") == length_prefix(header.size()) + header + i64 + f32 + u8);
  const SafetensorsFile file(folder / "out");
  REQUIRE(file.metadata() == Metadata{{"a", "1"}, {"format", "pt"}});
  REQUIRE(file.at("z\"\n\xc3\xa9").shape == std::vector<int64_t>{1, 2});
  REQUIRE(file.at("i").numel() == 1);
}

TEST_CASE("the writer refuses what its reader would, and leaves no file behind", "[format][cpu]") {
  const TemporaryFolder folder;
  const auto refused = [&](std::vector<TensorSpec> tensors) {
    return thrown<ValueError>([&] { SafetensorsWriter writer(folder / "out", std::move(tensors)); });
  };
  REQUIRE(has(refused({{"a", Dtype::kU8, {1}}, {"a", Dtype::kF32, {1}}}), "'a' twice"));
  REQUIRE(has(refused({{"__metadata__", Dtype::kU8, {1}}}), "__metadata__"));
  REQUIRE(has(refused({{std::string(5000, 'x'), Dtype::kU8, {1}}}), "4096"));
  REQUIRE(has(refused({{"\xff", Dtype::kU8, {1}}}), "UTF-8"));
  REQUIRE(has(refused({{"a", Dtype::kU8, {-1}}}), ">= 0"));
  REQUIRE(has(refused({{"a", Dtype::kU8, std::vector<int64_t>(65, 1)}}), "64"));
  REQUIRE(has(refused({{"a", Dtype::kF4, {3}}}), "whole number of bytes"));
  REQUIRE(has(refused({{"a", Dtype::kF32, {int64_t{1} << 62}}}), "2^63"));
  REQUIRE(has(refused({{"a", Dtype::kU8, {int64_t{1} << 59}},
                       {"b", Dtype::kU8, {int64_t{1} << 60}},
                       {"c", Dtype::kU8, {int64_t{1} << 60}},
                       {"d", Dtype::kF64, {int64_t{1} << 61}}}),
              "2^63"));
  const std::string four(4, 'x');
  {
    SafetensorsWriter writer(folder / "out", {{"a", Dtype::kU8, {3}}});
    REQUIRE(has(thrown<ValueError>([&] { writer.write(bytes_of(four)); }), "3 bytes left"));
    REQUIRE(has(thrown<ValueError>([&] { writer.finish(); }), "3 bytes are missing"));
  }
  REQUIRE(has(thrown<ValueError>([&] {
                write_safetensors(folder / "out", {{"a", Dtype::kU8, {3}}}, {}, [&](const auto&) { return bytes_of(four); });
              }),
              "3 bytes; got 4"));
  {
    const WithFaultyCalls faults({.call = "write", .error = ENOSPC, .after = 2});
    REQUIRE(has(thrown<IoError>([&] {
                  write_safetensors(folder / "out", {{"a", Dtype::kU8, {4}}}, {}, [&](const auto&) { return bytes_of(four); });
                }),
                "No space"));
  }
  REQUIRE(folder.entries() == 0);
}
