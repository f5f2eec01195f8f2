// SPDX-License-Identifier: MIT
#pragma once

// experts.svg: for each layer with experts how much each of them was chosen over the steps of a
// run, how uneven that was, and where experts moved. Pure functions, any thread.

#include "app/pictures/expert_history.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace bellows {

struct ExpertPlotOptions {
    std::string title = "Balance of experts";
    std::string subtitle;      ///< e.g. the layout
    std::uint64_t width = 880; ///< pixels
};

/// Documents are at most about as large; longer runs and more layers get fewer columns.
inline constexpr std::size_t kMostExpertPlotBytes = 500000;

/// A whole SVG document, of any history.
std::string expert_plot_svg(ExpertHistory history, const ExpertPlotOptions& options = {});

} // namespace bellows
