// SPDX-License-Identifier: MIT
#include "app/pictures/expert_plot.hpp"

#include "app/pictures/loss_plot.hpp"
#include "app/pictures/svg.hpp"
#include "app/units.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace bellows {

namespace {

using Layer = ExpertHistory::Layer;
using Column = ExpertHistory::Column;
using Mean = ExpertHistory::Mean;

constexpr double kLeft = 76, kRight = 28;
constexpr double kLegend = 84, kHeading = 24, kGap = 8, kLines = 46, kTicks = 22, kBetween = 20;
/// Lines end there: what is about even shows best; how bad a bad start is stands in metrics.jsonl.
constexpr double kMostRatio = 4;
constexpr const char* kExpertsColor = "#6b7280";
constexpr const char* kRanksColor = "#c2410c";
constexpr const char* kMovesColor = "#111827";

/// One hue, from white to dark; a color is for loads from the bound before it up to its own, in
/// means. The sixth is the mean's.
struct Shade {
    double below;
    const char* color;
};
constexpr std::array<Shade, 11> kShades = {{{0.1, "#ffffff"},
                                            {0.25, "#f0f5fb"},
                                            {0.5, "#deebf7"},
                                            {0.75, "#c6dbef"},
                                            {0.9, "#abd0e6"},
                                            {1.1, "#8bbddc"},
                                            {1.33, "#5fa6d1"},
                                            {1.75, "#3b8bc2"},
                                            {2.25, "#2070b4"},
                                            {3, "#0b529b"},
                                            {HUGE_VAL, "#08306b"}}};

std::size_t shade_of(double load) {
    return static_cast<std::size_t>(
        std::ranges::find_if(kShades, [&](const Shade& shade) { return load < shade.below; }) -
        kShades.begin());
}

/// Returns the height of a strip's row in whole pixels, so that all rows are equally high.
double row_height(std::uint64_t rows) {
    return rows <= 8 ? 10 : rows <= 16 ? 6 : rows <= 32 ? 4 : 2;
}

/// Where everything stands.
struct Frame {
    double left, right;
    std::uint64_t first, steps_per_column, last;
    std::size_t columns;
    double most;  ///< the top of the lines' axis, which begins at 1 and is logarithmic
    bool clipped; ///< some figures lie above it

    double column_width() const { return (right - left) / static_cast<double>(columns); }
    /// The middle of a step, or of a column.
    double x_of_step(double step) const {
        const auto width = static_cast<double>(steps_per_column);
        return left + (step - static_cast<double>(first) + 0.5) / width * column_width();
    }
    /// Returns how far below the top of the lines a figure stands.
    double y(double figure) const {
        return kLines * (1 - std::log(std::clamp(figure, 1.0, most)) / std::log(most));
    }
    double x(std::size_t column) const {
        return left + (static_cast<double>(column) + 0.5) * column_width();
    }
};

Frame frame_of(const ExpertHistory& history, const ExpertPlotOptions& options) {
    constexpr double kLeastRatio = 1.2;
    double most = kLeastRatio;
    for (const auto& [index, layer] : history.layers())
        for (const Column& column : layer.columns)
            for (const Mean* mean : {&column.experts, &column.ranks})
                if (mean->count > 0)
                    most = std::max(most, mean->value());
    return {kLeft,
            static_cast<double>(options.width) - kRight,
            history.first_step(),
            history.steps_per_column(),
            history.last_step(),
            history.columns(),
            std::min(most, kMostRatio),
            most > kMostRatio};
}

/// For each column whose loads are shown; between steps with loads the last ones stand.
std::vector<const Column*> shown_loads(const Layer& layer) {
    constexpr std::size_t kMostFilled = 2;
    std::vector<const Column*> shown(layer.columns.size());
    std::size_t filled = kMostFilled;
    for (std::size_t i = 0; i < shown.size(); ++i)
        if (layer.columns[i].steps_with_loads > 0) {
            shown[i] = &layer.columns[i];
            filled = 0;
        } else if (filled < kMostFilled) {
            shown[i] = shown[i - 1];
            ++filled;
        }
    return shown;
}

/// Runs of equal cells are one stroke of a path that has a unit for each column and row.
void draw_cells(std::ostream& out, const Frame& frame, const Layer& layer, double top) {
    const std::vector<const Column*> shown = shown_loads(layer);
    const auto shade_at = [&](std::size_t row, std::size_t column) -> std::optional<std::size_t> {
        if (column >= shown.size() || shown[column] == nullptr)
            return std::nullopt;
        return shade_of(shown[column]->loads[row] /
                        static_cast<double>(shown[column]->steps_with_loads));
    };
    std::array<std::string, kShades.size()> paths;
    for (std::size_t row = 0; row < layer.rows; ++row)
        for (std::size_t begin = 0; begin < shown.size();) {
            const auto shade = shade_at(row, begin);
            std::size_t end = begin + 1;
            while (end < shown.size() && shade_at(row, end) == shade)
                ++end;
            if (shade)
                paths[*shade]
                    .append("M")
                    .append(std::to_string(begin))
                    .append(" ")
                    .append(std::to_string(row))
                    .append("h")
                    .append(std::to_string(end - begin));
            begin = end;
        }
    const double height = row_height(layer.rows);
    out << "<g class=\"loads\" transform=\"translate(" << pixels(frame.left) << ","
        << pixels(top + height / 2) << ") scale(" << printed("%.5g", frame.column_width()) << ","
        << pixels(height) << ")\" fill=\"none\" shape-rendering=\"crispEdges\">\n";
    for (std::size_t i = 0; i < paths.size(); ++i)
        if (!paths[i].empty())
            out << "<path stroke=\"" << kShades[i].color << "\" d=\"" << paths[i] << "\"/>\n";
    out << "</g>\n";
}

void draw_line(std::ostream& out, double x0, double y0, double x1, double y1, const char* color) {
    out << "<line x1=\"" << pixels(x0) << "\" y1=\"" << pixels(y0) << "\" x2=\"" << pixels(x1)
        << "\" y2=\"" << pixels(y1) << "\" stroke=\"" << color << "\"/>\n";
}

void draw_upright(std::ostream& out, double x, double y, const char* text) {
    out << "<text transform=\"translate(" << pixels(x) << "," << pixels(y)
        << ") rotate(-90)\" text-anchor=\"middle\" class=\"tick\">" << text << "</text>\n";
}

/// Returns the y below.
double draw_strip(std::ostream& out, const Frame& frame, const Layer& layer, double top) {
    const double height = row_height(layer.rows) * static_cast<double>(layer.rows);
    // White means that nobody chose an expert; steps without loads show this ground instead.
    out << "<rect x=\"" << pixels(frame.left) << "\" y=\"" << pixels(top) << "\" width=\""
        << pixels(frame.right - frame.left) << "\" height=\"" << pixels(height)
        << "\" fill=\"#f3efe6\"/>\n";
    draw_cells(out, frame, layer, top);
    out << "<rect x=\"" << pixels(frame.left) << "\" y=\"" << pixels(top) << "\" width=\""
        << pixels(frame.right - frame.left) << "\" height=\"" << pixels(height)
        << "\" fill=\"none\" stroke=\"#9ca3af\"/>\n";
    draw_text(out, frame.left - 8, top + 10, "text-anchor=\"end\" class=\"tick\"", "0");
    if (layer.experts > 1)
        draw_text(out, frame.left - 8, std::max(top + height, top + 22),
                  "text-anchor=\"end\" class=\"tick\"", std::to_string(layer.experts - 1));
    draw_upright(out, 22, top + height / 2, "expert");
    return top + height;
}

/// The mean of each column that has some; a gap where none has.
void draw_curve(std::ostream& out, const Frame& frame, const Layer& layer, Mean Column::* figure,
                double top, const char* color) {
    std::string path;
    bool pen_down = false;
    for (std::size_t i = 0; i < layer.columns.size(); ++i) {
        const Mean& mean = layer.columns[i].*figure;
        if (mean.count == 0) {
            pen_down = false;
            continue;
        }
        path += pen_down ? 'L' : 'M';
        path += pixels(frame.x(i)) + "," + pixels(top + frame.y(mean.value()));
        if (!pen_down)
            path += "h.1"; // a point on its own shows, too
        pen_down = true;
    }
    if (!path.empty())
        out << "<path d=\"" << path << "\" fill=\"none\" stroke=\"" << color
            << "\" stroke-width=\"1.6\" stroke-linejoin=\"round\" stroke-linecap=\"round\"/>\n";
}

std::vector<double> line_ticks(double most) {
    if (most < 2)
        return {1, 1.1, 1.2, 1.5};
    return {1, 2, most < kMostRatio ? 3 : kMostRatio};
}

void draw_lines(std::ostream& out, const Frame& frame, const Layer& layer, double top) {
    constexpr double kLeastBetween = 12;
    double below = kLines + kLeastBetween; // from 1 up, where there is room
    for (const double tick : line_ticks(frame.most)) {
        const double y = frame.y(tick);
        if (tick > frame.most || below - y < kLeastBetween)
            continue;
        below = y;
        draw_line(out, frame.left, top + y, frame.right, top + y, "#e5e7eb");
        draw_text(out, frame.left - 8, top + y + 4, "text-anchor=\"end\" class=\"tick\"",
                  tick_label(tick) + (frame.clipped && tick == frame.most ? "+" : ""));
    }
    draw_upright(out, 22, top + kLines / 2, "max");
    draw_upright(out, 35, top + kLines / 2, "/ mean");
    const double bottom = top + kLines;
    draw_line(out, frame.left, bottom, frame.right, bottom, "#6b7280");
    for (const double tick :
         nice_ticks(static_cast<double>(frame.first), static_cast<double>(frame.last), 9))
        if (tick == std::floor(tick)) {
            const double x = frame.x_of_step(tick);
            draw_line(out, x, bottom, x, bottom + 4, "#6b7280");
            draw_text(out, x, bottom + 17, "text-anchor=\"middle\" class=\"tick\"",
                      tick_label(tick));
        }
    draw_curve(out, frame, layer, &Column::experts, top, kExpertsColor);
    draw_curve(out, frame, layer, &Column::ranks, top, kRanksColor);
}

/// A mark above the strip and a line through it and the lines below.
void draw_moves(std::ostream& out, const Frame& frame, const Layer& layer, double top,
                double bottom) {
    for (std::size_t i = 0; i < layer.columns.size(); ++i) {
        const Column& column = layer.columns[i];
        if (column.moves == 0)
            continue;
        std::string told;
        for (const std::string& move : column.told)
            told.append(told.empty() ? "" : "; ").append(move);
        if (column.moves > column.told.size())
            told += "; and " + std::to_string(column.moves - column.told.size()) + " more";
        const std::string x = pixels(frame.x(i));
        out << "<g class=\"move\" stroke=\"" << kMovesColor << "\"><title>" << escaped(told)
            << "</title><path stroke-width=\"5\" d=\"M" << x << "," << pixels(top - 6)
            << "v5\"/><path stroke-dasharray=\"3 2\" d=\"M" << x << "," << pixels(top) << "V"
            << pixels(bottom) << "\"/></g>\n";
    }
}

std::string heading_of(const ExpertBalance& last) {
    std::string text =
        "at the end: fullest expert " + printed("%.2f", last.max_over_mean) + " times the mean";
    if (last.ranks_max_over_mean)
        text += ", fullest rank " + printed("%.2f", *last.ranks_max_over_mean) + " times";
    text += ", entropy " + printed("%.3f", last.entropy);
    if (last.dropped)
        text += ", dropped " + printed("%.1f", 100 * *last.dropped) + " %";
    return text;
}

double height_of(const Layer& layer) {
    const double strip =
        layer.experts > 0 ? row_height(layer.rows) * static_cast<double>(layer.rows) + kGap : 0;
    return kHeading + strip + kLines + kTicks + kBetween;
}

void draw_layer(std::ostream& out, const Frame& frame, std::uint64_t index, const Layer& layer,
                double top) {
    const std::string name = "layer " + std::to_string(index);
    out << "<g class=\"layer\">\n";
    draw_text(out, frame.left, top + 12, "class=\"label\" font-weight=\"600\"", name);
    if (std::isfinite(layer.last.max_over_mean) && std::isfinite(layer.last.entropy))
        draw_text(out, frame.left + 16 + 9 * static_cast<double>(name.size()), top + 12,
                  "class=\"tick\"", heading_of(layer.last));
    const double strip = top + kHeading;
    const double lines = layer.experts > 0 ? draw_strip(out, frame, layer, strip) + kGap : strip;
    draw_lines(out, frame, layer, lines);
    draw_moves(out, frame, layer, strip, lines + kLines);
    out << "</g>\n";
}

/// Whether a column of any layer is so.
template <class Is>
bool any_column(const ExpertHistory& history, Is is) {
    return std::ranges::any_of(history.layers(), [&](const auto& layer) {
        return std::ranges::any_of(layer.second.columns, is);
    });
}

/// Colors with their bounds, then the lines that there are.
void draw_legend(std::ostream& out, const Frame& frame, const ExpertHistory& history, double top) {
    constexpr double kSwatch = 38;
    draw_text(out, frame.left, top + 12, "class=\"tick\"", "load / mean");
    const double left = frame.left + 92;
    for (std::size_t i = 0; i < kShades.size(); ++i) {
        const double x = left + kSwatch * static_cast<double>(i);
        out << "<rect x=\"" << pixels(x) << "\" y=\"" << pixels(top) << "\" width=\""
            << pixels(kSwatch) << "\" height=\"14\" fill=\"" << kShades[i].color
            << "\" stroke=\"#9ca3af\" stroke-width=\"0.5\"/>\n";
        if (i + 1 < kShades.size())
            draw_text(out, x + kSwatch, top + 28, "text-anchor=\"middle\" class=\"tick\"",
                      number(kShades[i].below));
    }
    double x = frame.left;
    const auto entry = [&](const char* color, const char* attributes, std::string_view text) {
        out << "<path d=\"M" << pixels(x) << "," << pixels(top + 46) << "h26\" stroke=\"" << color
            << "\" " << attributes << "/>\n";
        draw_text(out, x + 34, top + 50, "class=\"tick\"", text);
        x += 34 + kTickLetter * static_cast<double>(text.size()) + 20;
    };
    entry(kExpertsColor, "stroke-width=\"2\"", "fullest expert / mean");
    if (any_column(history, [](const Column& column) { return column.ranks.count > 0; }))
        entry(kRanksColor, "stroke-width=\"2\"", "fullest rank / mean");
    if (any_column(history, [](const Column& column) { return column.moves > 0; }))
        entry(kMovesColor, "stroke-dasharray=\"3 2\"", "experts moved");
    draw_text(out, frame.left, top + 70, "class=\"tick\"",
              frame.steps_per_column == 1
                  ? "across: steps, a column for each"
                  : "across: steps, " + std::to_string(frame.steps_per_column) +
                        " in a column, which shows their mean");
}

/// How many experts share a row, the same in all layers of a model.
std::uint64_t experts_per_row(const ExpertHistory& history) {
    std::uint64_t most = 1;
    for (const auto& [index, layer] : history.layers())
        most = std::max(most, layer.experts_per_row);
    return most;
}

std::string draw(const ExpertHistory& history, const ExpertPlotOptions& options) {
    const Frame frame = frame_of(history, options);
    std::string subtitle = options.subtitle;
    const auto add = [&](const std::string& text) {
        subtitle += (subtitle.empty() ? "" : "; ") + text;
    };
    if (const std::uint64_t experts = experts_per_row(history); experts > 1)
        add("a row is the fullest of " + std::to_string(experts) + " experts");
    if (history.left_layers_out())
        add("further layers are left out");
    const double heading_width = frame.right - frame.left;
    const double legend = heading_bottom(heading_width, options.title, subtitle) + 8;
    double height = legend + kLegend;
    for (const auto& [index, layer] : history.layers())
        height += height_of(layer);
    std::ostringstream out;
    begin_svg(out, options.width, static_cast<std::uint64_t>(std::ceil(height)));
    draw_heading(out, frame.left, heading_width, options.title, subtitle);
    if (history.empty()) {
        draw_text(out, frame.left, legend + 12, "class=\"label\"", "no steps yet");
    } else {
        draw_legend(out, frame, history, legend);
        double top = legend + kLegend;
        for (const auto& [index, layer] : history.layers()) {
            draw_layer(out, frame, index, layer, top);
            top += height_of(layer);
        }
    }
    out << "</svg>\n";
    return out.str();
}

} // namespace

std::string expert_plot_svg(ExpertHistory history, const ExpertPlotOptions& options) {
    history.fit_to_loads();
    std::string picture = draw(history, options);
    while (picture.size() > kMostExpertPlotBytes && history.columns() > 1) {
        history.halve();
        picture = draw(history, options);
    }
    return picture;
}

} // namespace bellows
