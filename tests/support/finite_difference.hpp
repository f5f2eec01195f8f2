// SPDX-License-Identifier: MIT
#pragma once

// Gradients of f64 functions by central differences, to check the reference's own gradients.

#include "support/compare.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

namespace bellows::test {

/// df/dx at x by central differences. With step 1e-5 and values of order one the truncation error
/// is about 1e-10 and the rounding error about 1e-11.
inline std::vector<double>
numeric_gradient(std::vector<double> x, const std::function<double(const std::vector<double>&)>& f,
                 double step = 1e-5) {
    std::vector<double> gradient(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double centre = x[i];
        x[i] = centre + step;
        const double above = f(x);
        x[i] = centre - step;
        const double below = f(x);
        x[i] = centre;
        gradient[i] = (above - below) / (2 * step);
    }
    return gradient;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

/// `analytic` equals df/dx at x element by element, and is not all zero.
inline testing::AssertionResult
gradient_matches(const std::vector<double>& analytic, const std::vector<double>& x,
                 const std::function<double(const std::vector<double>&)>& f) {
    const std::vector<double> numeric = numeric_gradient(x, f);
    if (std::all_of(numeric.begin(), numeric.end(), [](double g) { return g == 0; }))
        return testing::AssertionFailure() << "the function does not depend on its argument";
    return elements_match(analytic, numeric, {}, within(1e-8, 1e-6));
}

} // namespace bellows::test
