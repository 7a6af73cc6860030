// SPDX-License-Identifier: Apache-2.0
#include "core/svg.hpp"

#include <array>
#include <cmath>
#include <cstdio>

#include "core/check.hpp"

namespace qlorapp::svg {
namespace {

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '<') result += "&lt;";
    else if (c == '>') result += "&gt;";
    else if (c == '&') result += "&amp;";
    else if (c == '"') result += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20) result += c;
  }
  return result;
}

}  // namespace

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

std::string begin(double width, double height) {
  return message(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect "
      "width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      number(width), number(height));
}

std::string text(double x, double y, std::string_view content, std::string_view anchor, std::string_view more) {
  return message("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\"{}>{}</text>\n", number(x), number(y), anchor, more, escaped(content));
}

std::string line(double x1, double x2, double y1, double y2, std::string_view style) {
  return message("<line x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\" {}/>\n", number(x1), number(x2), number(y1), number(y2), style);
}

std::string dot(double x, double y, double radius, std::string_view fill) {
  return message("<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{}\"/>\n", number(x), number(y), number(radius), fill);
}

std::string square(double x, double y, double side, std::string_view fill) {
  const std::string length = message("{}", side);
  return message("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>\n", number(x), number(y), length, length, fill);
}

std::string point(double x, double y) { return message("{},{} ", number(x), number(y)); }

std::string polygon(std::string_view fill, std::string_view points) {
  return message("<polygon fill=\"{}\" points=\"{}\"/>\n", fill, points);
}

std::string polyline(std::string_view style, std::string_view points) {
  return message("<polyline fill=\"none\" {} points=\"{}\"/>\n", style, points);
}

double tick_distance(double range) {
  double step = std::pow(10, std::floor(std::log10(range)));
  if (range / step < 2.5) step /= 4;
  else if (range / step < 5) step /= 2;
  return step;
}

}  // namespace qlorapp::svg
