// SPDX-License-Identifier: MIT
#pragma once

// The numeric checks of verify/reference/compare.hpp as GoogleTest assertions.

#include "verify/reference/compare.hpp"

#include <gtest/gtest.h>

namespace bellows::test {

using reference::bf16_bits;
using reference::calc_diff;
using reference::coordinates;
using reference::from_bf16;
using reference::kBf16Epsilon;
using reference::kF32Epsilon;
using reference::Random;
using reference::random_bf16;
using reference::random_f32;
using reference::random_indices;
using reference::round_to_bf16;
using reference::sum_bound;
using reference::to_double;
using reference::to_float;
using reference::ulp_distance;
using reference::within;

/// compare_elements() as an assertion: shows the first and the worst wrong element.
template <class Actual, class Expected, class Bound>
::testing::AssertionResult elements_match(const Actual& actual, const Expected& expected,
                                          const std::vector<std::uint64_t>& shape, Bound&& bound) {
    const reference::Comparison result =
        reference::compare_elements(actual, expected, shape, bound);
    return result.good ? ::testing::AssertionSuccess()
                       : ::testing::AssertionFailure() << result.text;
}

} // namespace bellows::test
