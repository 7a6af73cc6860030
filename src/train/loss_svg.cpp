// SPDX-License-Identifier: Apache-2.0
#include "train/loss_svg.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/svg.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"

namespace qlorapp {
namespace {

constexpr double kWidth = 960, kHeight = 420, kLeft = 70, kRight = 230, kTop = 48, kBottom = 48;
constexpr std::string_view kTrainColor = "#2f6db3", kEvalColor = "#e07b39", kRateColor = "#b9c2cb";

struct Point {
  double step = 0, value = 0;
};
using Curve = std::vector<Point>;

Curve curve_of(const format::Json& history, const char* key) {
  Curve curve;
  for (const format::Json& entry : history) {
    QLORAPP_CHECK_FORMAT(entry.is_object(), "[loss_svg] an entry of log_history must be an object; got {}.", entry.type_name());
    const auto step = entry.find("step"), value = entry.find(key);
    if (step == entry.end() || value == entry.end() || !step->is_number() || !value->is_number()) continue;
    curve.push_back({step->get<double>(), value->get<double>()});
  }
  return curve;
}

/// Means of neighbors; one that is not finite makes its mean so.
Curve thinned(const Curve& curve, size_t most) {
  if (curve.size() <= most) return curve;
  Curve result;
  for (size_t i = 0; i < most; ++i) {
    const size_t begin = i * curve.size() / most, end = (i + 1) * curve.size() / most;
    Point mean;
    for (size_t k = begin; k < end; ++k) {
      mean.step += curve[k].step / static_cast<double>(end - begin);
      mean.value += curve[k].value / static_cast<double>(end - begin);
    }
    result.push_back(mean);
  }
  return result;
}

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(const Curve& curve) {
    for (const Point& point : curve) {
      if (!std::isfinite(point.value)) continue;
      low = std::min(low, point.value);
      high = std::max(high, point.value);
    }
  }
  [[nodiscard]] bool is_empty() const { return high < low; }
};

/// A line through neighbors that are finite, and a dot for each point without one, or for all of them.
std::string drawn(const Curve& curve, std::string_view color, bool dots, const auto& x_of, const auto& y_of) {
  std::string picture, points;
  size_t in_line = 0;
  const auto end_line = [&] {
    if (in_line > 1) picture += svg::polyline(message("stroke=\"{}\" stroke-width=\"1.5\"", color), points);
    points.clear();
    in_line = 0;
  };
  for (size_t i = 0; i < curve.size(); ++i) {
    if (!std::isfinite(curve[i].value)) {
      end_line();
      continue;
    }
    const double x = x_of(curve[i].step), y = y_of(curve[i].value);
    points += svg::point(x, y);
    ++in_line;
    const bool is_alone = in_line == 1 && (i + 1 == curve.size() || !std::isfinite(curve[i + 1].value));
    if (dots || is_alone) picture += svg::dot(x, y, 3, color);
  }
  end_line();
  return picture;
}

}  // namespace

std::string loss_svg(const format::Json& history) {
  QLORAPP_CHECK_FORMAT(history.is_array(), "[loss_svg] log_history must be a list; got {}.", history.type_name());
  const Curve all = curve_of(history, "loss"), train = thinned(all, 1000), eval = curve_of(history, "eval_loss"),
              rate = thinned(curve_of(history, "learning_rate"), 1000);
  Range losses, rates, steps;
  losses.add(train);
  losses.add(eval);
  rates.add(rate);
  double last_step = 1;
  for (const Curve* curve : {&all, &eval})
    for (const Point& point : *curve) last_step = std::max(last_step, point.step);

  std::string picture = svg::begin(kWidth, kHeight);
  picture += svg::text(kLeft, 22, message("Loss over {:.0f} steps", last_step), "start", " font-size=\"15\" font-weight=\"bold\"");
  if (losses.is_empty()) return picture + svg::text(kLeft, kTop + 20, "no finite loss was logged") + std::string(svg::kEnd);
  const double span = std::max(losses.high - losses.low, std::max(std::fabs(losses.high), 1e-9) * 1e-3);
  const double low = losses.low - 0.04 * span, high = losses.low + 1.04 * span;
  const double bottom = kHeight - kBottom, right = kWidth - kRight;
  const auto x_of = [&](double step) { return kLeft + step / last_step * (right - kLeft); };
  const auto y_of = [&](double loss) { return bottom - (loss - low) / (high - low) * (bottom - kTop); };

  const double distance = svg::tick_distance(high - low);
  for (double tick = std::ceil(low / distance) * distance; tick <= high; tick += distance) {
    picture += svg::line(kLeft, right, y_of(tick), y_of(tick), "stroke=\"#dddddd\"");
    picture += svg::text(kLeft - 8, y_of(tick) + 4, message("{:.4g}", std::fabs(tick) < distance * 1e-6 ? 0.0 : tick), "end");
  }
  const double stride = std::max(1.0, std::ceil(svg::tick_distance(last_step)));
  for (double step = 0; step <= last_step; step += stride)
    picture += svg::text(x_of(step), bottom + 20, message("{:.0f}", step), "middle");
  picture += svg::line(kLeft, right, bottom, bottom, "stroke=\"#555555\"");

  double legend = kTop + 10;
  const auto explain = [&](std::string_view color, const std::string& text) {
    picture += svg::square(right + 14, legend - 10, 12, color);
    picture += svg::text(right + 32, legend, text);
    legend += 20;
  };
  if (!rates.is_empty() && rates.high > 0) {
    picture += drawn(rate, kRateColor, false, x_of, [&](double value) { return bottom - value / rates.high * (bottom - kTop); });
    explain(kRateColor, message("learning rate, {:.4g} at most", rates.high));
  }
  if (!train.empty()) {
    picture += drawn(train, kTrainColor, false, x_of, y_of);
    explain(kTrainColor, message("training loss, {:.4g} at the end", all.back().value));
  }
  if (!eval.empty()) {
    picture += drawn(eval, kEvalColor, true, x_of, y_of);
    const auto best = std::min_element(eval.begin(), eval.end(), [](const Point& a, const Point& b) {
      return std::isfinite(a.value) && (!std::isfinite(b.value) || a.value < b.value);
    });
    explain(kEvalColor, message("evaluation loss, {:.4g} at best", best->value));
  }
  return picture.append(svg::kEnd);
}

void write_loss_svg(const std::string& folder, const format::Json& history) {
  files::write_file_atomically(files::path_in(folder, "loss.svg"), loss_svg(history));
}

}  // namespace qlorapp
