// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/packing.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>

#include "core/check.hpp"
#include "core/nearest_name.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 3> kNames{"bfd", "bfd_split", "wrapped"};

/// Tokens [begin, end) of a row.
struct RowPart {
  std::size_t row = 0, begin = 0, end = 0;
  [[nodiscard]] int64_t length() const { return static_cast<int64_t>(end - begin); }
};

/// Whether a position of the piece has a target: its first token is predicted by nothing.
bool is_trained(const Example& row, const RowPart& piece) {
  const auto labels = row.labels.begin();
  return std::any_of(labels + static_cast<std::ptrdiff_t>(piece.begin) + 1, labels + static_cast<std::ptrdiff_t>(piece.end),
                     [](TokenId label) { return label != Example::kIgnored; });
}

/// The pieces of packs that best-fit decreasing fills.
std::vector<std::vector<RowPart>> fit(std::span<const Example> rows, std::size_t capacity, bool split, Packed& out) {
  std::vector<RowPart> pieces;
  std::vector<int64_t> lengths;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const std::size_t length = rows[row].input_ids.size(), kept = split ? length : std::min(length, capacity);
    out.cut_tokens += static_cast<int64_t>(length - kept);
    for (std::size_t begin = 0; begin < kept; begin += capacity) {
      const RowPart piece{row, begin, std::min(kept, begin + capacity)};
      if (!is_trained(rows[row], piece)) {
        ++out.untrained_rows;
        continue;
      }
      pieces.push_back(piece);
      lengths.push_back(piece.length());
    }
  }
  std::vector<std::vector<RowPart>> packs;
  for (const std::vector<int64_t>& members : best_fit_decreasing(lengths, static_cast<int64_t>(capacity))) {
    packs.emplace_back();
    for (const int64_t member : members) packs.back().push_back(pieces[static_cast<std::size_t>(member)]);
  }
  return packs;
}

/// The pieces of all rows laid end to end and cut every `capacity` tokens.
std::vector<std::vector<RowPart>> wrap(std::span<const Example> rows, std::size_t capacity, Packed& out) {
  std::vector<std::vector<RowPart>> packs;
  std::size_t used = capacity;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const std::size_t length = rows[row].input_ids.size();
    for (std::size_t begin = 0; begin < length;) {
      if (used == capacity) {
        packs.emplace_back();
        used = 0;
      }
      const RowPart piece{row, begin, std::min(length, begin + capacity - used)};
      if (is_trained(rows[row], piece)) packs.back().push_back(piece);
      else ++out.untrained_rows;
      used += piece.end - piece.begin;
      begin = piece.end;
    }
  }
  std::erase_if(packs, [](const std::vector<RowPart>& pack) { return pack.empty(); });
  return packs;
}

Example join(std::span<const Example> rows, const std::vector<RowPart>& pieces) {
  Example out;
  for (const RowPart& piece : pieces) {
    const Example& row = rows[piece.row];
    const auto begin = static_cast<std::ptrdiff_t>(piece.begin), end = static_cast<std::ptrdiff_t>(piece.end);
    out.input_ids.insert(out.input_ids.end(), row.input_ids.begin() + begin, row.input_ids.begin() + end);
    out.labels.insert(out.labels.end(), row.labels.begin() + begin, row.labels.begin() + end);
    out.row_lengths.push_back(piece.length());
  }
  out.line = rows[pieces.front().row].line;
  return out;
}

}  // namespace

PackingStrategy packing_strategy(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<PackingStrategy>(i);
  }
  throw ValueError(message("[packing_strategy] must be bfd, bfd_split or wrapped; got '{}'.{}", name, did_you_mean(name, kNames)));
}

std::vector<std::vector<int64_t>> best_fit_decreasing(std::span<const int64_t> lengths, int64_t capacity) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto length_of = [&](int64_t i) { return lengths[static_cast<std::size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length_of(a) > length_of(b); });

  std::vector<std::vector<int64_t>> packs;
  std::map<int64_t, std::deque<std::size_t>> packs_by_room;  // full ones are not in it
  for (const int64_t i : order) {
    const int64_t length = length_of(i);
    QLORAPP_CHECK_VALUE(length >= 1 && length <= capacity, "[packing] lengths must be from 1 to {}; got {}.", capacity, length);
    std::size_t pack = packs.size();
    int64_t room = capacity;
    if (const auto fullest = packs_by_room.lower_bound(length); fullest != packs_by_room.end()) {
      room = fullest->first;
      pack = fullest->second.front();
      fullest->second.pop_front();
      if (fullest->second.empty()) packs_by_room.erase(fullest);
    } else {
      packs.emplace_back();
    }
    packs[pack].push_back(i);
    if (room > length) packs_by_room[room - length].push_back(pack);
  }
  return packs;
}

Packed pack(std::span<const Example> rows, int64_t max_length, PackingStrategy strategy) {
  QLORAPP_CHECK_VALUE(max_length >= 2, "[packing] max_length must be at least 2; got {}.", max_length);
  Packed out;
  for (const Example& row : rows) {
    QLORAPP_CHECK_VALUE(row.row_lengths.size() <= 1,
                        "[packing] rows must not be packed already; the row at line {} holds {} rows. Turn packing off.", row.line,
                        row.row_lengths.size());
    if (!row.input_ids.empty()) ++out.rows;
  }
  const auto capacity = static_cast<std::size_t>(max_length);
  const auto packs = strategy == PackingStrategy::kWrapped
                         ? wrap(rows, capacity, out)
                         : fit(rows, capacity, strategy == PackingStrategy::kBestFitDecreasingSplit, out);
  for (const std::vector<RowPart>& pieces : packs) {
    out.examples.push_back(join(rows, pieces));
    out.tokens += static_cast<int64_t>(out.examples.back().input_ids.size());
  }
  QLORAPP_CHECK_VALUE(!out.examples.empty(),
                      "[packing] a row must have a trained token; none of {} has a label in its first {} tokens. Raise max_length, "
                      "or check the labels.",
                      out.rows, max_length);
  return out;
}

std::string Packed::line(int64_t max_length) const {
  const double room = static_cast<double>(examples.size()) * static_cast<double>(max_length);
  std::string out = message("{} rows in {} packs of at most {} tokens, {} % full", rows, examples.size(), max_length,
                            std::round(1000.0 * static_cast<double>(tokens) / room) / 10.0);
  if (cut_tokens > 0) out += message("; {} tokens cut off", cut_tokens);
  if (untrained_rows > 0) out += message("; {} left out, without a trained token", untrained_rows);
  return out;
}

}  // namespace qlorapp
