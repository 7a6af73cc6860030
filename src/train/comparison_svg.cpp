// SPDX-License-Identifier: Apache-2.0
#include "train/comparison_svg.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "core/svg.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"

namespace qlorapp {
namespace {

constexpr double kHeight = 320, kLeft = 40, kTop = 70, kBottom = 60, kBar = 44, kGroup = 190;
constexpr std::string_view kBaseColor = "#b9c2cb", kAdapterColor = "#2f6db3";

struct Pair {
  std::string label;
  std::optional<double> base, adapter;
  bool is_share = false;
};

std::vector<Pair> pairs_of(const Comparison& of) {
  const RunScore none;
  const RunScore& base = of.base ? *of.base : none;
  const auto share = [&](const std::optional<int64_t>& count) -> std::optional<double> {
    return count ? std::optional(static_cast<double>(*count) / static_cast<double>(of.answers)) : std::nullopt;
  };
  std::vector<Pair> pairs;
  if (of.eval_rows > 0) pairs.push_back({message("held-out loss, {} rows", of.eval_rows), base.eval_loss, of.adapter.eval_loss});
  if (of.neutral_tokens > 0)
    pairs.push_back({message("neutral text, {} tokens", of.neutral_tokens), base.neutral_loss, of.adapter.neutral_loss});
  if (of.answers > 0) {
    pairs.push_back(
        {message("exact match, {} answers", of.answers), share(base.exact_matches), share(of.adapter.exact_matches), true});
    pairs.push_back({"answers that stop", share(base.stopped), share(of.adapter.stopped), true});
  }
  return pairs;
}

/// A bar with its number above it; a line of text alone where there is none.
std::string bar(double x, const std::optional<double>& value, bool is_share, double highest, std::string_view color) {
  const double bottom = kHeight - kBottom;
  if (!value || !std::isfinite(*value)) return svg::text(x + kBar / 2, bottom - 6, value ? message("{}", *value) : "-", "middle");
  const double top = bottom - std::clamp(*value / highest, 0.0, 1.0) * (bottom - kTop), right = x + kBar;
  return svg::polygon(color, svg::point(x, bottom) + svg::point(x, top) + svg::point(right, top) + svg::point(right, bottom)) +
         svg::text(x + kBar / 2, top - 6, is_share ? message("{:.3g} %", 100 * *value) : message("{:.4g}", *value), "middle");
}

}  // namespace

std::string comparison_svg(const Comparison& comparison) {
  const std::vector<Pair> pairs = pairs_of(comparison);
  double highest = 1e-9;
  for (const Pair& pair : pairs) {
    for (const auto& value : {pair.base, pair.adapter})
      if (!pair.is_share && value && std::isfinite(*value)) highest = std::max(highest, *value);
  }
  const double width = std::max(2 * kLeft + static_cast<double>(pairs.size()) * kGroup, 360.0), bottom = kHeight - kBottom;
  std::string picture = svg::begin(width, kHeight);
  picture += svg::text(kLeft, 22, "Base against adapter", "start", " font-size=\"15\" font-weight=\"bold\"");
  picture += svg::square(kLeft, 32, 12, kBaseColor) + svg::text(kLeft + 18, 42, "base");
  picture += svg::square(kLeft + 70, 32, 12, kAdapterColor) + svg::text(kLeft + 88, 42, "adapter");
  double x = kLeft + 20;
  for (const Pair& pair : pairs) {
    const double scale = pair.is_share ? 1.0 : highest;
    picture +=
        bar(x, pair.base, pair.is_share, scale, kBaseColor) + bar(x + kBar + 8, pair.adapter, pair.is_share, scale, kAdapterColor);
    picture += svg::text(x + kBar + 4, bottom + 20, pair.label, "middle");
    x += kGroup;
  }
  picture += svg::line(kLeft, width - kLeft, bottom, bottom, "stroke=\"#555555\"");
  return picture.append(svg::kEnd);
}

void write_comparison_svg(const std::string& folder, const Comparison& comparison) {
  files::write_file_atomically(files::path_in(folder, kComparisonPicture), comparison_svg(comparison));
}

}  // namespace qlorapp
