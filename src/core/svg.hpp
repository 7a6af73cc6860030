// SPDX-License-Identifier: Apache-2.0
/// The elements of this library's pictures: SVG documents without scripts, links or fonts of their own. Coordinates are in pixels, with one
/// digit behind the point.
#pragma once

#include <string>
#include <string_view>

namespace qlorapp::svg {

/// One digit behind the point.
[[nodiscard]] std::string number(double value);

/// The head of a document with a white background. Its end is kEnd.
[[nodiscard]] std::string begin(double width, double height);
inline constexpr std::string_view kEnd = "</svg>\n";

/// @param content  is escaped; control characters are left out.  @param anchor  start, middle or end.
/// @param more  further attributes, with a space before them.
[[nodiscard]] std::string text(double x, double y, std::string_view content, std::string_view anchor = "start",
                               std::string_view more = "");

/// @param style  attributes: stroke and its width, such as stroke="black".
[[nodiscard]] std::string line(double x1, double x2, double y1, double y2, std::string_view style);

[[nodiscard]] std::string dot(double x, double y, double radius, std::string_view fill);

/// A filled square: the key of a legend.
[[nodiscard]] std::string square(double x, double y, double side, std::string_view fill);

/// A point of a polygon or a polyline, with a space behind it.
[[nodiscard]] std::string point(double x, double y);
/// @param points  of point().
[[nodiscard]] std::string polygon(std::string_view fill, std::string_view points);
[[nodiscard]] std::string polyline(std::string_view style, std::string_view points);

/// The distance of an axis's ticks, for a range that is above 0: a power of ten, a half or a quarter of one, so that 2 to 10 fit.
[[nodiscard]] double tick_distance(double range);

}  // namespace qlorapp::svg
