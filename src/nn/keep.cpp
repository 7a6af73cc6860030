// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/keep.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "nn/saved.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 4> kKeepNames{"everything", "attention_only", "input_only", "input_on_host"};

Keep keep_named(std::string_view text, std::string_view also) {
  for (size_t i = 0; i < kKeepNames.size(); ++i) {
    if (kKeepNames[i] == text) return static_cast<Keep>(i);
  }
  throw ValueError(
      message("[keep] must be one of {}{}; got '{}'.{}", joined(kKeepNames), also, text, did_you_mean(text, kKeepNames)));
}

}  // namespace

std::string_view to_string(Keep keep) { return kKeepNames[static_cast<size_t>(keep)]; }

Keep parse_keep(std::string_view text) { return keep_named(text, ""); }

Bytes Saved::nbytes() const {
  Bytes total;
  std::vector<const void*> counted;  // storages: what shares one may be narrower than it
  Saved copy = *this;
  copy.for_each([&](const at::Tensor& tensor) {
    if (!tensor.defined() || (x_on_host && tensor.is_same(x))) return;
    const void* const storage = tensor.storage().unsafeGetStorageImpl();
    if (std::find(counted.begin(), counted.end(), storage) != counted.end()) return;
    counted.push_back(storage);
    total += Bytes{static_cast<int64_t>(tensor.storage().nbytes())};
  });
  return total;
}

Bytes Saved::host_nbytes() const { return x_on_host && x.defined() ? Bytes{static_cast<int64_t>(x.nbytes())} : Bytes{}; }

namespace {

std::vector<std::string_view> entries_of(std::string_view text) {
  std::vector<std::string_view> entries;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string_view entry = text.substr(begin, end - begin);
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    entries.push_back(entry);
    begin = end + 1;
  }
  return entries;
}

/// What stands behind the ':' of an entry.
int64_t number_in(std::string_view entry, std::string_view number, const char* rule) {
  int64_t count = 0;
  const auto [last, error] = std::from_chars(number.data(), number.data() + number.size(), count);
  QLORAPP_CHECK_VALUE(error == std::errc() && last == number.data() + number.size() && count > 0,
                      "[keep] '{}': behind ':' comes a number of blocks, at least 1. Write {}.", entry, rule);
  return count;
}

/// Segments of several blocks: "every:4", "sqrt", and behind it where their inputs wait.
struct Spacing {
  int64_t every = 0;  ///< 0: about √N.
  Keep keep = Keep::kInputOnly;
};

std::optional<Spacing> parse_spacing(std::string_view text) {
  constexpr std::string_view kEvery = "every:";
  const std::vector<std::string_view> entries = entries_of(text);
  const std::string_view first = entries.front();
  if (first != "sqrt" && !first.starts_with(kEvery)) return std::nullopt;
  Spacing spacing;
  if (first != "sqrt") spacing.every = number_in(first, first.substr(kEvery.size()), "\"every:4\"");
  if (entries.size() > 1) spacing.keep = parse_keep(entries[1]);
  QLORAPP_CHECK_VALUE(entries.size() <= 2 && (spacing.keep == Keep::kInputOnly || spacing.keep == Keep::kInputOnHost),
                      "[keep] '{}': of several blocks the first one's input is kept, so behind {} comes input_only, input_on_host "
                      "or nothing. Write \"{},input_on_host\".",
                      text, first, first);
  return spacing;
}

struct NamedRun {
  Keep keep = Keep::kEverything;
  int64_t count = -1;  ///< -1: what is left.
};

std::vector<NamedRun> parse_runs(std::string_view text) {
  std::vector<NamedRun> runs;
  int64_t rests = 0;
  for (std::string_view entry : entries_of(text)) {
    NamedRun run;
    if (const size_t colon = entry.find(':'); colon != std::string_view::npos) {
      run.count = number_in(entry, entry.substr(colon + 1), "\"input_only:20,everything:12\"");
      entry = entry.substr(0, colon);
      while (entry.ends_with(' ')) entry.remove_suffix(1);
    } else {
      ++rests;
    }
    run.keep = keep_named(entry, ", or every:K or sqrt alone");
    runs.push_back(run);
  }
  if (rests == std::ssize(runs) && rests > 1) {  // one entry a block
    for (NamedRun& run : runs) run.count = 1;
    return runs;
  }
  QLORAPP_CHECK_VALUE(rests <= 1,
                      "[keep] only one entry may omit its number of blocks (it covers the rest); got '{}'. Write "
                      "\"input_only:20,everything:12\".",
                      text);
  return runs;
}

}  // namespace

std::vector<Segment> parse_segments(std::string_view text, int64_t blocks) {
  if (const auto spacing = parse_spacing(text)) {
    return spacing->every > 0 ? checkpoint_every(blocks, spacing->every, spacing->keep) : checkpoint_sqrt(blocks, spacing->keep);
  }
  const std::vector<NamedRun> runs = parse_runs(text);
  int64_t named = 0;
  bool rest = false;
  for (const NamedRun& run : runs) {
    if (run.count < 0) rest = true;
    else if (run.count > blocks - named) named = blocks + 1;  // and stays there: sums of hostile numbers do not overflow
    else named += run.count;
  }
  QLORAPP_CHECK_VALUE(rest ? named <= blocks : named == blocks,
                      "[keep] '{}' must name the model's {} blocks; it names {}. Omit the number of one entry: it covers "
                      "the rest.",
                      text, blocks, named > blocks ? "more" : message("{}", named));
  std::vector<Segment> segments;
  for (const NamedRun& run : runs) {
    const int64_t count = run.count < 0 ? blocks - named : run.count;
    for (int64_t i = 0; i < count; ++i) segments.push_back({std::ssize(segments), std::ssize(segments) + 1, run.keep});
  }
  return segments;
}

void check_segments(std::string_view text) {
  if (!parse_spacing(text)) static_cast<void>(parse_runs(text));
}

std::vector<Segment> keep_in_each_block(int64_t blocks, Keep keep) {
  std::vector<Segment> segments;
  for (int64_t i = 0; i < blocks; ++i) segments.push_back({i, i + 1, keep});
  return segments;
}

std::vector<Segment> checkpoint_every(int64_t blocks, int64_t k, Keep keep) {
  QLORAPP_CHECK_VALUE(k >= 1, "[checkpoint_every] the number of blocks a segment must be at least 1; got {}.", k);
  QLORAPP_CHECK_VALUE(
      keep == Keep::kInputOnly || keep == Keep::kInputOnHost,
      "[checkpoint_every] of several blocks the first one's input is kept: keep must be input_only or input_on_host; got {}.",
      to_string(keep));
  std::vector<Segment> segments;
  for (int64_t begin = 0; begin < blocks; begin = segments.back().end)
    segments.push_back({begin, k < blocks - begin ? begin + k : blocks, keep});
  return segments;
}

std::vector<Segment> checkpoint_sqrt(int64_t blocks, Keep keep) {
  return checkpoint_every(blocks, std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(blocks)))), keep);
}

}  // namespace qlorapp
