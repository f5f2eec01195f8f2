// SPDX-License-Identifier: MIT
#pragma once

// A Gantt chart: who did what when. Pure functions, any thread.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

struct GanttBar {
    double start = 0, end = 0;
    std::string label; ///< shown where it fits
    std::string name;  ///< shown under a pointer
    std::string color; ///< as SVG writes it
    /// Of bars at once those of lower layers stand above.
    int layer = 0;
    /// The part of the row's height that it takes.
    double top = 0, bottom = 1;
};

struct GanttRow {
    std::string name, note; ///< left and right of it
    std::vector<GanttBar> bars;
};

/// Bars that overlap by more than a tenth of the shorter one stand above each other, with those
/// that overlap these, each layer on a level of its own. Returns the most levels.
std::size_t stack_bars(std::vector<GanttBar>& bars);

struct GanttChart {
    std::string title, subtitle, x_label;
    double row_height = 1; ///< times the usual one
    std::vector<GanttRow> rows;
    std::vector<std::pair<std::string, std::string>> legend; ///< what a color means: text, color
};

/// A whole SVG document, as wide as the labels of most bars need, within 900 and 4000 pixels, or
/// wider where rows have long names. Title, subtitle and legend go in as many lines as they need.
std::string gantt_svg(const GanttChart& chart);

} // namespace bellows
