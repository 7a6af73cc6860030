// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/timeline_svg.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/svg.hpp"
#include "memory/report_text.hpp"

namespace qlorapp {
namespace {

constexpr double kWidth = 960, kHeight = 460, kLeft = 70, kRight = 230, kTop = 48, kBottom = 48;
/// Static parts in grays and blues, what comes and goes in warm colors; one a MemoryUse.
constexpr std::array<std::string_view, ops::kMemoryUseCount> kColors{"#4e5d6c", "#6b7b8c", "#8c9aa8", "#2f6db3", "#5b93cf",
                                                                     "#8fb8e0", "#b9c2cb", "#c9d6c1", "#59a14f", "#f2b134",
                                                                     "#e07b39", "#b07aa1", "#d1495b", "#3b8ea5", "#76b7b2"};

}  // namespace

std::vector<MeasuredPoint> measured_curve(const MemoryPlan& plan, std::span<const MeasuredMemory::Moment> moments) {
  std::vector<MeasuredPoint> curve;
  size_t first = 0;
  for (size_t begin = 0, end = 0; begin < plan.timeline.size(); begin = end) {
    const ops::MemoryPhase phase = plan.timeline[begin].phase;
    while (end < plan.timeline.size() && plan.timeline[end].phase == phase) ++end;
    while (first < moments.size() && moments[first].phase < phase) ++first;
    size_t last = first;
    while (last < moments.size() && moments[last].phase == phase) ++last;
    const auto own = moments.subspan(first, last - first);
    const size_t points = std::min(end - begin, own.size());
    for (size_t i = 0; i < points; ++i) {
      MeasuredPoint point{static_cast<double>(begin) +
                              (static_cast<double>(i) + 0.5) * static_cast<double>(end - begin) / static_cast<double>(points),
                          {}};
      for (size_t k = i * own.size() / points; k < (i + 1) * own.size() / points; ++k)
        point.most = std::max(point.most, own[k].in_use);
      curve.push_back(point);
    }
    first = last;
  }
  return curve;
}

std::string timeline_title(std::string_view model, const PlanSettings& settings, std::string_view card) {
  return message("{}{}{} x {} tokens in {}, on {}", model, model.empty() ? "" : ", ", settings.batch, settings.length,
                 report::dtype_name(settings.compute_dtype), card);
}

std::string timeline_svg(const MemoryPlan& plan, const std::string& title, std::optional<Bytes> limit,
                         std::span<const MeasuredMemory::Moment> measured) {
  QLORAPP_CHECK_VALUE(!plan.timeline.empty(), "[timeline_svg] the plan has no timeline.");
  const auto count = static_cast<double>(plan.timeline.size());
  int64_t most = 1;
  for (const TimelinePoint& point : plan.timeline) most = std::max(most, sum(point.parts).count);
  const std::vector<MeasuredPoint> curve = measured_curve(plan, measured);
  for (const MeasuredPoint& point : curve) most = std::max(most, point.most.count);
  const bool is_far = limit && limit->count > 3 * most;  // its line would flatten the picture
  if (limit && !is_far) most = std::max(most, limit->count);
  const double unit = most >= (int64_t{1} << 30) ? 0x1p30 : 0x1p20;
  const std::string_view unit_name = unit == 0x1p30 ? "GiB" : "MiB";
  const double scale = (kHeight - kTop - kBottom) / (static_cast<double>(most) * 1.04);
  const auto y_of = [&](double bytes) { return kHeight - kBottom - bytes * scale; };
  const auto x_of = [&](double index) { return kLeft + index / count * (kWidth - kLeft - kRight); };

  std::string picture = svg::begin(kWidth, kHeight);
  picture += svg::text(kLeft, 22, title, "start", " font-size=\"15\" font-weight=\"bold\"");
  picture += svg::text(8, kTop - 10, message("{} allocated", unit_name));
  const double top = static_cast<double>(most) / unit;
  const double step = svg::tick_distance(top);
  for (double tick = 0; tick <= top * 1.02; tick += step) {
    const double y = y_of(tick * unit);
    picture += svg::line(kLeft, kWidth - kRight, y, y, "stroke=\"#dddddd\"");
    picture += svg::text(kLeft - 8, y + 4, message("{} {}", svg::number(tick), unit_name), "end");
  }

  std::vector<double> below(plan.timeline.size(), 0);
  double legend = kTop + 10;
  for (size_t use = 0; use < ops::kMemoryUseCount; ++use) {
    std::string forth, back;
    double widest = 0;
    for (size_t i = 0; i < plan.timeline.size(); ++i) {
      const auto bytes = static_cast<double>(plan.timeline[i].parts[use].count);
      widest = std::max(widest, bytes);
      const double x0 = x_of(static_cast<double>(i)), x1 = x_of(static_cast<double>(i) + 1);
      back = svg::point(x1, y_of(below[i])) + svg::point(x0, y_of(below[i])) + back;
      below[i] += bytes;
      forth += svg::point(x0, y_of(below[i])) + svg::point(x1, y_of(below[i]));
    }
    if (widest == 0) continue;
    picture += svg::polygon(kColors[use], forth + back);
    picture += svg::square(kWidth - kRight + 14, legend - 10, 12, kColors[use]);
    picture +=
        svg::text(kWidth - kRight + 32, legend,
                  message("{} {} {}", ops::to_string(static_cast<ops::MemoryUse>(use)), svg::number(widest / unit), unit_name));
    legend += 20;
  }

  for (size_t i = 0; i < plan.timeline.size(); ++i) {
    if (i > 0 && plan.timeline[i].phase == plan.timeline[i - 1].phase) continue;
    size_t end = i;
    while (end < plan.timeline.size() && plan.timeline[end].phase == plan.timeline[i].phase) ++end;
    const double x0 = x_of(static_cast<double>(i)), x1 = x_of(static_cast<double>(end));
    picture += svg::line(x0, x0, kTop, kHeight - kBottom + 6, "stroke=\"#555555\" stroke-dasharray=\"3 3\"");
    if (x1 - x0 > 30) picture += svg::text((x0 + x1) / 2, kHeight - kBottom + 20, ops::to_string(plan.timeline[i].phase), "middle");
  }
  if (limit) {
    const double y = is_far ? kTop : y_of(static_cast<double>(limit->count));
    if (!is_far) picture += svg::line(kLeft, kWidth - kRight, y, y, "stroke=\"#d1495b\" stroke-width=\"2\"");
    picture += svg::text(kWidth - kRight - 4, y - 5, message("limit {}{}", to_string(*limit), is_far ? ", above this picture" : ""),
                         "end");
  }
  if (!curve.empty()) {
    std::string points;
    Bytes peak;
    for (const MeasuredPoint& point : curve) {
      points += svg::point(x_of(point.at), y_of(static_cast<double>(point.most.count)));
      peak = std::max(peak, point.most);
    }
    picture += svg::polyline("stroke=\"black\" stroke-width=\"1.5\"", points);
    picture +=
        svg::line(kWidth - kRight + 14, kWidth - kRight + 26, legend - 4, legend - 4, "stroke=\"black\" stroke-width=\"1.5\"");
    picture += svg::text(kWidth - kRight + 32, legend,
                         message("measured, {} {} at most", svg::number(static_cast<double>(peak.count) / unit), unit_name));
  }
  return picture.append(svg::kEnd);
}

}  // namespace qlorapp
