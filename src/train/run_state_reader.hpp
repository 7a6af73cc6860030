// SPDX-License-Identifier: Apache-2.0
/// Reads run_state.json, the numbers of a checkpoint that TrainState keeps. Torch-free.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {

inline constexpr std::string_view kRunStateFile = "run_state.json";
/// 1: another order of the adapters in optimizer.safetensors; 2: an epoch's end was part of its last step; 3: no data fingerprints; 4: no
/// number of ranks; 5: no skips in a row.
inline constexpr int64_t kRunStateSchema = 6;

/// Key by key; each is required and of its type.
class RunStateReader {
 public:
  explicit RunStateReader(const std::string& folder)
      : path_(files::path_in(folder, kRunStateFile)), json_(files::read_json_inside(path_, {.allow_nonfinite = true})) {
    int64_t schema = 0;
    integer("schema", schema);
    QLORAPP_CHECK_FORMAT(schema == kRunStateSchema,
                         "[resume] {} has schema {}; this version reads {}. Resume with the version that wrote it.", path_, schema,
                         kRunStateSchema);
  }

  template <class Integer>
  void integer(const char* key, Integer& into) const {
    constexpr int64_t kLargest = int64_t{1} << 42;  // more than any count, and room for a product
    constexpr auto kMost = std::is_same_v<Integer, int64_t> ? kLargest : static_cast<int64_t>(std::numeric_limits<Integer>::max());
    const format::Json& value = find(key);
    QLORAPP_CHECK_FORMAT(value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() <= kMost,
                         "[resume] {}: '{}' must be an integer from 0 to {}; got {}.", path_, key, kMost,
                         printable(value.dump(-1, ' ', true)));
    into = static_cast<Integer>(value.get<int64_t>());
  }
  void number(const char* key, double& into) const {
    const format::Json& value = find(key);
    QLORAPP_CHECK_FORMAT(value.is_number(), "[resume] {}: '{}' must be a number.", path_, key);
    into = value.get<double>();
  }
  void text(const char* key, std::string& into) const {
    const format::Json& value = find(key);
    QLORAPP_CHECK_FORMAT(value.is_string(), "[resume] {}: '{}' must be a string.", path_, key);
    into = value.get<std::string>();
  }
  /// An object of values that are no objects, each as JSON; empty if the key is missing.
  void values(const char* key, std::vector<std::pair<std::string, std::string>>& into) const {
    into.clear();
    const auto found = json_.find(key);
    if (found == json_.end()) return;
    QLORAPP_CHECK_FORMAT(found->is_object(), "[resume] {}: '{}' must be an object.", path_, key);
    for (const auto& [name, value] : found->items()) {
      QLORAPP_CHECK_FORMAT(!value.is_object(), "[resume] {}: '{}' must hold numbers, strings, booleans, null or lists.", path_,
                           key);
      into.emplace_back(name, value.dump(-1, ' ', true));
    }
  }
  /// 64 bits as hexadecimal text: JSON's numbers are doubles to most readers.
  void bits(const char* key, uint64_t& into) const {
    std::string digits;
    text(key, digits);
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), into, 16);
    QLORAPP_CHECK_FORMAT(error == std::errc{} && stop == digits.data() + digits.size(),
                         "[resume] {}: '{}' must be a string of hexadecimal digits; got {}.", path_, key, printable(digits));
  }

 private:
  const format::Json& find(const char* key) const {
    const auto found = json_.find(key);
    QLORAPP_CHECK_FORMAT(found != json_.end(), "[resume] {} lacks '{}'. The checkpoint is not one of this version.", path_, key);
    return *found;
  }
  std::string path_;
  format::Json json_;
};

}  // namespace qlorapp
