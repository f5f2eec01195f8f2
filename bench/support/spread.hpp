// SPDX-License-Identifier: MIT
#pragma once

// What all benchmarks say of repeated measurements: the median, beside it the least and the most.
// Pure functions.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace bellows::bench {

struct Spread {
    double median = 0, least = 0, most = 0;

    Spread scaled(double factor) const { return {factor * median, factor * least, factor * most}; }
};

/// Of at least one value; of an even number the upper one is the median.
inline Spread spread_of(std::vector<double> values) {
    std::ranges::sort(values);
    return {values[values.size() / 2], values.front(), values.back()};
}
/// Of what each run has: a member, or what a function makes of it.
template <class Run, class What>
Spread spread_of(const std::vector<Run>& runs, What what) {
    std::vector<double> values;
    for (const Run& run : runs)
        values.push_back(std::invoke(what, run));
    return spread_of(std::move(values));
}
inline double median_of(std::vector<double> values) {
    return spread_of(std::move(values)).median;
}
template <class Run, class What>
double median_of(const std::vector<Run>& runs, What what) {
    return spread_of(runs, what).median;
}

/// "12.1-14": the column "min-max".
inline std::string range_text(const Spread& spread) {
    char text[48];
    std::snprintf(text, sizeof text, "%.4g-%.4g", spread.least, spread.most);
    return text;
}

} // namespace bellows::bench
