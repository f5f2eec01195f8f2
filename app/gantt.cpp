// SPDX-License-Identifier: MIT
#include "app/gantt.hpp"

#include "app/loss_plot.hpp"
#include "app/svg.hpp"
#include "app/units.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>

namespace bellows {

namespace {

constexpr double kLeft = 84, kRight = 110, kTop = 104, kRow = 30, kGap = 5, kBottom = 58;
constexpr double kLetter = 7.2; ///< width, about

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

void draw_bar(std::ostream& out, const GanttBar& bar, double x0, double x1, double y, double row) {
    const double top = y + bar.top * row, height = (bar.bottom - bar.top) * row;
    out << "<rect x=\"" << pixels(x0) << "\" y=\"" << pixels(top) << "\" width=\""
        << printed("%.2f", x1 - x0) << "\" height=\"" << pixels(height) << "\" fill=\"" << bar.color
        << "\" stroke=\"#fdfdfc\" stroke-width=\"0.8\"><title>" << escaped(bar.name) << ", "
        << printed("%.6g", bar.start) << " to " << printed("%.6g", bar.end) << "</title></rect>\n";
    if (x1 - x0 > kLetter * static_cast<double>(bar.label.size()) + 4)
        draw_text(out, (x0 + x1) / 2, top + height / 2 + 4,
                  "text-anchor=\"middle\" class=\"tick\" pointer-events=\"none\"", bar.label);
}

/// Of an entry, its gap included.
double legend_width(const std::string& text) {
    return 22 + kLetter * static_cast<double>(text.size()) + 18;
}

void draw_legend(std::ostream& out, const GanttChart& chart) {
    double x = kLeft;
    for (const auto& [text, color] : chart.legend) {
        out << "<rect x=\"" << pixels(x) << "\" y=\"72\" width=\"16\" height=\"14\" fill=\""
            << color << "\"/>\n";
        draw_text(out, x + 22, 84, "class=\"tick\"", text);
        x += legend_width(text);
    }
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
    double least = 900;
    for (double legend = kLeft; const auto& entry : chart.legend)
        least = std::max(least, legend += legend_width(entry.first));
    const double width =
        std::clamp(kLeft + kRight + 22 * span / extent.shortest, least, std::max(least, 4000.0));
    const double tall = kRow * chart.row_height;
    const double height = kTop + kBottom + (tall + kGap) * static_cast<double>(chart.rows.size());
    const auto x_of = [&](double time) {
        return kLeft + (time - extent.first) / span * (width - kLeft - kRight);
    };
    std::ostringstream out;
    begin_svg(out, static_cast<std::uint64_t>(width), static_cast<std::uint64_t>(height));
    draw_text(out, kLeft, 34, "class=\"title\"", chart.title);
    draw_text(out, kLeft, 54, "class=\"subtitle\"", chart.subtitle);
    draw_legend(out, chart);
    double y = kTop;
    for (const GanttRow& row : chart.rows) {
        draw_text(out, kLeft - 10, y + tall / 2 + 4, "text-anchor=\"end\" class=\"tick\"",
                  row.name);
        out << "<rect x=\"" << pixels(kLeft) << "\" y=\"" << pixels(y) << "\" width=\""
            << pixels(width - kLeft - kRight) << "\" height=\"" << pixels(tall)
            << "\" fill=\"#eeeeec\"/>\n";
        for (const GanttBar& bar : row.bars)
            draw_bar(out, bar, x_of(bar.start), x_of(bar.end), y, tall);
        draw_text(out, width - kRight + 10, y + tall / 2 + 4, "class=\"tick\"", row.note);
        y += tall + kGap;
    }
    for (const double tick : nice_ticks(extent.first, extent.last, 12)) {
        out << "<line x1=\"" << pixels(x_of(tick)) << "\" y1=\"" << pixels(y) << "\" x2=\""
            << pixels(x_of(tick)) << "\" y2=\"" << pixels(y + 5) << "\" stroke=\"#6b7280\"/>\n";
        draw_text(out, x_of(tick), y + 20, "text-anchor=\"middle\" class=\"tick\"",
                  printed("%.6g", tick));
    }
    draw_text(out, (kLeft + width - kRight) / 2, y + 42, "text-anchor=\"middle\" class=\"label\"",
              chart.x_label);
    out << "</svg>\n";
    return out.str();
}

} // namespace bellows
