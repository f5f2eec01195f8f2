// SPDX-License-Identifier: MIT
#pragma once

// loss.svg: the loss of a run over its steps, every step faintly and a smoothed curve on top, and
// what text kept out of training has. Pure functions, any thread.

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

struct LossPoint {
    std::uint64_t step = 0;
    double loss = 0; ///< points that are not finite leave a gap
};

struct LossPlotOptions {
    std::string title = "Training loss";
    std::string subtitle; ///< e.g. the layout and the data
    std::string y_label = "loss (nats per byte)";
    double tokens_scale = 1; ///< where it is not 1: nats per token of a nat per byte, at the right
    std::uint64_t width = 880; ///< pixels
    std::uint64_t height = 500;
    std::uint64_t smoothing_span = 0; ///< steps; 0: a fortieth of the run, at least 5
};

/// The exponential moving average with weight 2/(span + 1) for the newest value, divided by the sum
/// of its weights so that the first values count fully.
std::vector<LossPoint> smoothed(const std::vector<LossPoint>& points, std::uint64_t span);

/// Up to about `most` round numbers (1, 2 or 5 times a power of ten apart) within [low, high].
std::vector<double> nice_ticks(double low, double high, int most);
/// 40000 → "40k", 2.5 → "2.5"; ticks are round, so few digits serve.
std::string tick_label(double value);

/// A whole SVG document. Any number of points, also none; long runs are thinned to what the width
/// can show.
/// held_out: a second curve, in the order of steps; may be empty.
std::string loss_plot_svg(const std::vector<LossPoint>& points, const LossPlotOptions& options = {},
                          const std::vector<LossPoint>& held_out = {});

} // namespace bellows
