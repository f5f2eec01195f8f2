// SPDX-License-Identifier: MIT
#include "app/pictures/gantt.hpp"

#include "app/pictures/loss_plot.hpp"
#include "app/pictures/svg.hpp"
#include "app/units.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>

namespace bellows {

namespace {

constexpr double kLeastLeft = 84, kLeastRight = 110; // margins beside rows
constexpr double kRow = 30, kGap = 5, kBottom = 58, kLegendLine = 20;

struct Extent {
    double first = 0, last = 1, shortest = 1;
};

Extent extent_of(const GanttChart& chart) {
    constexpr double kNone = std::numeric_limits<double>::infinity();
    Extent extent{kNone, -kNone, kNone};
    std::vector<double> lengths; // of bars with a label
    for (const GanttRow& row : chart.rows)
        for (const GanttBar& bar : row.bars) {
            extent.first = std::min(extent.first, bar.start);
            extent.last = std::max(extent.last, bar.end);
            if (bar.end > bar.start && !bar.label.empty())
                lengths.push_back(bar.end - bar.start);
        }
    if (!lengths.empty()) { // one of ten may be too short for its label
        const auto tenth = lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 10);
        std::nth_element(lengths.begin(), tenth, lengths.end());
        extent.shortest = *tenth;
    }
    return extent.last > extent.first ? extent : Extent{};
}

/// Margins that row names and notes fit into.
struct Margins {
    double left = kLeastLeft, right = kLeastRight;
};

Margins margins_of(const GanttChart& chart) {
    constexpr double kAround = 24;
    Margins margins;
    for (const GanttRow& row : chart.rows) {
        const auto width_of = [](const std::string& text) {
            return kTickLetter * static_cast<double>(text.size()) + kAround;
        };
        margins.left = std::max(margins.left, width_of(row.name));
        margins.right = std::max(margins.right, width_of(row.note));
    }
    return margins;
}

/// The border takes at most a quarter of the bar, and bars that are hardly wider than it have none:
/// thousands of them side by side stay visible.
void draw_bar(std::ostream& out, const GanttBar& bar, double x0, double x1, double y, double row) {
    constexpr double kBorder = 0.8, kLeastWithBorder = 2, kLeastWidth = 0.2;
    const double top = y + bar.top * row, height = (bar.bottom - bar.top) * row;
    const double width = std::max(x1 - x0, kLeastWidth);
    out << "<rect x=\"" << printed("%.2f", x0) << "\" y=\"" << pixels(top) << "\" width=\""
        << printed("%.2f", width) << "\" height=\"" << pixels(height) << "\" fill=\"" << bar.color
        << "\"";
    if (width >= kLeastWithBorder)
        out << " stroke=\"#fdfdfc\" stroke-width=\""
            << printed("%.2g", std::min({kBorder, width / 4, height / 4})) << "\"";
    out << "><title>" << escaped(bar.name) << ", " << printed("%.6g", bar.start) << " to "
        << printed("%.6g", bar.end) << "</title></rect>\n";
    if (x1 - x0 > kTickLetter * static_cast<double>(bar.label.size()) + 4)
        draw_text(out, (x0 + x1) / 2, top + height / 2 + 4,
                  "text-anchor=\"middle\" class=\"tick\" pointer-events=\"none\"", bar.label);
}

/// Of an entry, its gap included.
double legend_width(const std::string& text) {
    return 22 + kTickLetter * static_cast<double>(text.size()) + 18;
}

/// In lines from `top` to at most `right`. Returns the y below.
double draw_legend(std::ostream& out, const GanttChart& chart, double left, double right,
                   double top) {
    double x = left;
    for (const auto& [text, color] : chart.legend) {
        if (x > left && x + legend_width(text) > right) {
            x = left;
            top += kLegendLine;
        }
        out << "<rect x=\"" << pixels(x) << "\" y=\"" << pixels(top)
            << "\" width=\"16\" height=\"14\" fill=\"" << color << "\"/>\n";
        draw_text(out, x + 22, top + 12, "class=\"tick\"", text);
        x += legend_width(text);
    }
    return top + (chart.legend.empty() ? 0 : kLegendLine) + 12;
}

/// Whether two bars, the second of which begins no sooner, are at once.
bool overlap(const GanttBar& first, const GanttBar& second) {
    constexpr double kLeast = 0.1;
    return first.end - second.start >
           kLeast * std::min(first.end - first.start, second.end - second.start);
}

/// Of bars that overlap one after the other, in the order of their starts. Returns the number of
/// levels: one for each layer, more where bars of one are at once.
std::size_t stack(std::span<GanttBar* const> bars) {
    std::vector<std::vector<GanttBar*>> levels;
    for (GanttBar* const bar : bars) {
        const auto fits = [&](const std::vector<GanttBar*>& level) {
            return level.back()->layer == bar->layer && !overlap(*level.back(), *bar);
        };
        const auto level = std::ranges::find_if(levels, fits);
        (level == levels.end() ? levels.emplace_back() : *level).push_back(bar);
    }
    std::ranges::stable_sort(levels, {}, [](const auto& level) { return level.back()->layer; });
    const double height = 1 / static_cast<double>(levels.size());
    for (std::size_t i = 0; i < levels.size(); ++i)
        for (GanttBar* const bar : levels[i]) {
            bar->top = height * static_cast<double>(i);
            bar->bottom = height * static_cast<double>(i + 1);
        }
    return levels.size();
}

} // namespace

std::size_t stack_bars(std::vector<GanttBar>& bars) {
    std::vector<GanttBar*> all;
    for (GanttBar& bar : bars)
        all.push_back(&bar);
    std::ranges::stable_sort(all, {}, [](const GanttBar* bar) { return bar->start; });
    std::size_t most = 0;
    for (std::size_t begin = 0; begin < all.size();) {
        std::size_t end = begin + 1;
        const auto joins = [&](const GanttBar* before) { return overlap(*before, *all[end]); };
        while (end < all.size() &&
               std::any_of(all.begin() + static_cast<std::ptrdiff_t>(begin),
                           all.begin() + static_cast<std::ptrdiff_t>(end), joins))
            ++end;
        most = std::max(most, stack(std::span(all).subspan(begin, end - begin)));
        begin = end;
    }
    return most;
}

std::string gantt_svg(const GanttChart& chart) {
    const Extent extent = extent_of(chart);
    const double span = extent.last - extent.first;
    constexpr double kNarrowest = 900, kWidest = 4000;
    const auto [left, right] = margins_of(chart);
    const double least = std::max(kNarrowest, 2 * (left + right));
    const double width =
        std::clamp(left + right + 22 * span / extent.shortest, least, std::max(least, kWidest));
    const double tall = kRow * chart.row_height;
    const auto x_of = [&](double time) {
        return left + (time - extent.first) / span * (width - left - right);
    };
    std::ostringstream body; // its height is known when all is drawn
    const double heading = draw_heading(body, left, width - left - 10, chart.title, chart.subtitle);
    double y = draw_legend(body, chart, left, width - 10, heading);
    std::ostream& out = body;
    for (const GanttRow& row : chart.rows) {
        draw_text(out, left - 10, y + tall / 2 + 4, "text-anchor=\"end\" class=\"tick\"", row.name);
        out << "<rect x=\"" << pixels(left) << "\" y=\"" << pixels(y) << "\" width=\""
            << pixels(width - left - right) << "\" height=\"" << pixels(tall)
            << "\" fill=\"#eeeeec\"/>\n";
        for (const GanttBar& bar : row.bars)
            draw_bar(out, bar, x_of(bar.start), x_of(bar.end), y, tall);
        draw_text(out, width - right + 10, y + tall / 2 + 4, "class=\"tick\"", row.note);
        y += tall + kGap;
    }
    for (const double tick : nice_ticks(extent.first, extent.last, 12)) {
        out << "<line x1=\"" << pixels(x_of(tick)) << "\" y1=\"" << pixels(y) << "\" x2=\""
            << pixels(x_of(tick)) << "\" y2=\"" << pixels(y + 5) << "\" stroke=\"#6b7280\"/>\n";
        draw_text(out, x_of(tick), y + 20, "text-anchor=\"middle\" class=\"tick\"",
                  printed("%.6g", tick));
    }
    draw_text(out, (left + width - right) / 2, y + 42, "text-anchor=\"middle\" class=\"label\"",
              chart.x_label);
    std::ostringstream document;
    begin_svg(document, static_cast<std::uint64_t>(width), static_cast<std::uint64_t>(y + kBottom));
    document << body.str() << "</svg>\n";
    return document.str();
}

} // namespace bellows
