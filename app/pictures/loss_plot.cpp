// SPDX-License-Identifier: MIT
#include "app/pictures/loss_plot.hpp"

#include "app/pictures/svg.hpp"
#include "app/units.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string_view>

namespace bellows {

namespace {

constexpr double kLeft = 76;
constexpr double kRight = 28;
constexpr double kTopMargin = 12; // below the heading
constexpr double kBottom = 62;
constexpr const char* kRawColor = "#9db8d9";
constexpr const char* kCurveColor = "#c2410c";
constexpr const char* kHeldOutColor = "#15803d";

/// Data to pixels: a linear map per axis.
struct Frame {
    double x0, x1, y0, y1; // of the data
    double left, right, top, bottom;

    double x(double step) const { return left + (step - x0) / (x1 - x0) * (right - left); }
    double y(double loss) const { return bottom - (loss - y0) / (y1 - y0) * (bottom - top); }
};

bool has_right_axis(const LossPlotOptions& options) {
    return options.tokens_scale != 1 && std::isfinite(options.tokens_scale) &&
           options.tokens_scale > 0;
}

double right_of(const LossPlotOptions& options) {
    return static_cast<double>(options.width) - (has_right_axis(options) ? kLeft : kRight);
}

double heading_width(const LossPlotOptions& options) {
    return right_of(options) - kLeft;
}

Frame frame_of(const std::vector<LossPoint>& points, const std::vector<LossPoint>& held_out,
               const LossPlotOptions& options) {
    double x0 = std::numeric_limits<double>::infinity();
    double y0 = x0;
    double x1 = -x0;
    double y1 = -x0;
    for (const std::vector<LossPoint>* curve : {&points, &held_out}) {
        for (const LossPoint& point : *curve) {
            if (std::isfinite(point.loss)) {
                x0 = std::min(x0, static_cast<double>(point.step));
                x1 = std::max(x1, static_cast<double>(point.step));
                y0 = std::min(y0, point.loss);
                y1 = std::max(y1, point.loss);
            }
        }
    }
    if (x0 > x1) {
        x0 = y0 = 0;
        x1 = y1 = 1;
    }
    if (x1 - x0 < 1) {
        x1 = x0 + 1;
    }
    const double margin = y1 > y0 ? 0.05 * (y1 - y0) : std::max(0.05 * std::abs(y1), 1e-3);
    return {x0,
            x1,
            y0 - margin,
            y1 + margin,
            kLeft,
            right_of(options),
            heading_bottom(heading_width(options), options.title, options.subtitle) + kTopMargin,
            static_cast<double>(options.height) - kBottom};
}

/// At most two points per pixel column, its lowest and its highest: the picture stays the same.
std::vector<LossPoint> thinned(const std::vector<LossPoint>& points, std::size_t columns) {
    const std::size_t bucket = points.size() / columns + 1;
    if (bucket <= 2) {
        return points;
    }
    std::vector<LossPoint> out;
    const auto less = [](const LossPoint& a, const LossPoint& b) {
        // What is not finite counts as highest, so that its gap stays.
        return std::isfinite(a.loss) && (!std::isfinite(b.loss) || a.loss < b.loss);
    };
    for (std::size_t i = 0; i < points.size(); i += bucket) {
        const auto first = points.begin() + static_cast<std::ptrdiff_t>(i);
        const auto last =
            points.begin() + static_cast<std::ptrdiff_t>(std::min(points.size(), i + bucket));
        auto [low, high] = std::minmax_element(first, last, less);
        out.push_back(*std::min(low, high));
        if (low != high) {
            out.push_back(*std::max(low, high));
        }
    }
    return out;
}

std::string path_of(const std::vector<LossPoint>& points, const Frame& frame) {
    std::string path;
    bool pen_down = false;
    for (const LossPoint& point : points) {
        if (!std::isfinite(point.loss)) {
            pen_down = false;
            continue;
        }
        path += (pen_down ? "L" : "M") + pixels(frame.x(static_cast<double>(point.step))) + "," +
                pixels(frame.y(point.loss));
        pen_down = true;
    }
    return path;
}

void draw_axes(std::ostream& out, const Frame& frame, const LossPlotOptions& options) {
    const auto line = [&](double x0, double y0, double x1, double y1, const char* color) {
        out << "<line x1=\"" << pixels(x0) << "\" y1=\"" << pixels(y0) << "\" x2=\"" << pixels(x1)
            << "\" y2=\"" << pixels(y1) << "\" stroke=\"" << color << "\"/>\n";
    };
    for (const double tick : nice_ticks(frame.y0, frame.y1, 7)) {
        line(frame.left, frame.y(tick), frame.right, frame.y(tick), "#e5e7eb");
        draw_text(out, frame.left - 10, frame.y(tick) + 4, "text-anchor=\"end\" class=\"tick\"",
                  tick_label(tick));
    }
    for (const double tick : nice_ticks(frame.x0, frame.x1, 9)) {
        if (tick != std::floor(tick)) {
            continue; // there are no half steps
        }
        line(frame.x(tick), frame.bottom, frame.x(tick), frame.bottom + 5, "#6b7280");
        draw_text(out, frame.x(tick), frame.bottom + 20, "text-anchor=\"middle\" class=\"tick\"",
                  tick_label(tick));
    }
    line(frame.left, frame.bottom, frame.right, frame.bottom, "#6b7280");
    draw_text(out, (frame.left + frame.right) / 2, frame.bottom + 44,
              "text-anchor=\"middle\" class=\"label\"", "step");
    const auto upright = [&](double x, const std::string& label) {
        out << "<text transform=\"translate(" << pixels(x) << ","
            << pixels((frame.top + frame.bottom) / 2)
            << ") rotate(-90)\" text-anchor=\"middle\" class=\"label\">" << escaped(label)
            << "</text>\n";
    };
    upright(22, options.y_label);
    if (!has_right_axis(options))
        return;
    const double scale = options.tokens_scale;
    for (const double tick : nice_ticks(frame.y0 * scale, frame.y1 * scale, 7)) {
        line(frame.right, frame.y(tick / scale), frame.right + 5, frame.y(tick / scale), "#6b7280");
        draw_text(out, frame.right + 10, frame.y(tick / scale) + 4, "class=\"tick\"",
                  tick_label(tick));
    }
    upright(static_cast<double>(options.width) - 14, "nats per token");
}

struct LegendEntry {
    const char* color;
    std::string text;
};

void draw_legend(std::ostream& out, const Frame& frame, const std::vector<LegendEntry>& entries) {
    const double x = frame.right - 258;
    const double y = frame.top + 18;
    out << "<rect x=\"" << pixels(x - 12) << "\" y=\"" << pixels(y - 16)
        << "\" width=\"270\" height=\"" << 12 + 18 * entries.size()
        << "\" rx=\"5\" fill=\"#ffffff\" fill-opacity=\"0.85\" stroke=\"#e5e7eb\"/>\n";
    const auto entry = [&](double at, const char* color, int width, const std::string& text) {
        out << "<line x1=\"" << pixels(x) << "\" y1=\"" << pixels(at) << "\" x2=\""
            << pixels(x + 26) << "\" y2=\"" << pixels(at) << "\" stroke=\"" << color
            << "\" stroke-width=\"" << width << "\"/>\n";
        draw_text(out, x + 34, at + 4, "class=\"tick\"", text);
    };
    for (std::size_t i = 0; i < entries.size(); ++i)
        entry(y + 18 * static_cast<double>(i), entries[i].color, 2, entries[i].text);
}

std::string with_last(const std::string& text, double last) {
    return std::isfinite(last) ? text + ": " + printed("%.3f", last) : text;
}

} // namespace

std::vector<LossPoint> smoothed(const std::vector<LossPoint>& points, std::uint64_t span) {
    const double alpha = 2 / (static_cast<double>(std::max<std::uint64_t>(span, 1)) + 1);
    std::vector<LossPoint> out;
    double sum = 0;
    double weight = 0;
    for (const LossPoint& point : points) {
        if (std::isfinite(point.loss)) {
            sum = (1 - alpha) * sum + alpha * point.loss;
            weight = (1 - alpha) * weight + alpha;
            out.push_back({point.step, sum / weight});
        }
    }
    return out;
}

std::string tick_label(double value) {
    if (std::abs(value) >= 1e6) {
        return printed("%.6gM", value / 1e6);
    }
    return std::abs(value) >= 1e4 ? printed("%.6gk", value / 1e3) : printed("%.6g", value);
}

std::vector<double> nice_ticks(double low, double high, int most) {
    if (!(high > low) || !std::isfinite(high - low) || most < 1) {
        return {};
    }
    const double power = std::pow(10, std::floor(std::log10((high - low) / most)));
    double spacing = 10 * power;
    for (const double factor : {1.0, 2.0, 5.0}) {
        if ((high - low) / (factor * power) <= most) {
            spacing = factor * power;
            break;
        }
    }
    std::vector<double> ticks;
    const double first = std::ceil(low / spacing - 1e-9);
    for (int i = 0; i <= most + 1; ++i) {
        const double tick = (first + i) * spacing;
        if (tick > high + 1e-9 * spacing) {
            break;
        }
        ticks.push_back(tick == 0 ? 0 : tick); // no "-0"
    }
    return ticks;
}

std::string loss_plot_svg(const std::vector<LossPoint>& points, const LossPlotOptions& options,
                          const std::vector<LossPoint>& held_out) {
    const Frame frame = frame_of(points, held_out, options);
    const std::uint64_t span = options.smoothing_span > 0
                                   ? options.smoothing_span
                                   : std::max<std::uint64_t>(points.size() / 40, 5);
    const std::vector<LossPoint> curve = smoothed(points, span);
    const auto columns = static_cast<std::size_t>(std::max(frame.right - frame.left, 1.0));

    std::ostringstream out;
    begin_svg(out, options.width, options.height);
    draw_heading(out, frame.left, heading_width(options), options.title, options.subtitle);
    draw_axes(out, frame, options);
    if (curve.empty()) {
        draw_text(out, (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2,
                  "text-anchor=\"middle\" class=\"label\"", "no steps yet");
    } else {
        out << "<path d=\"" << path_of(thinned(points, columns), frame)
            << "\" fill=\"none\" stroke=\"" << kRawColor
            << "\" stroke-width=\"1\" stroke-linejoin=\"round\"/>\n<path d=\""
            << path_of(thinned(curve, columns), frame) << "\" fill=\"none\" stroke=\""
            << kCurveColor << "\" stroke-width=\"2.2\" stroke-linejoin=\"round\"/>\n";
        std::vector<LegendEntry> legend = {
            {kRawColor, "each step"},
            {kCurveColor,
             with_last("mean of about " + std::to_string(span) + " steps", curve.back().loss)}};
        if (!held_out.empty()) {
            out << "<path d=\"" << path_of(thinned(held_out, columns), frame)
                << "\" fill=\"none\" stroke=\"" << kHeldOutColor
                << "\" stroke-width=\"2.2\" stroke-linejoin=\"round\"/>\n";
            for (const LossPoint& point : thinned(held_out, columns / 8))
                if (std::isfinite(point.loss))
                    out << "<circle cx=\"" << pixels(frame.x(static_cast<double>(point.step)))
                        << "\" cy=\"" << pixels(frame.y(point.loss)) << "\" r=\"2.5\" fill=\""
                        << kHeldOutColor << "\"/>\n";
            legend.push_back({kHeldOutColor, with_last("held-out text", held_out.back().loss)});
        }
        draw_legend(out, frame, legend);
    }
    out << "</svg>\n";
    return out.str();
}

} // namespace bellows
