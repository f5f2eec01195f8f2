// SPDX-License-Identifier: MIT
#pragma once

// What an element of a matrix product may err by, dense or grouped. Pure functions, any thread.

#include "verify/reference/compare.hpp"
#include "verify/reference/gemm.hpp"

#include <bellows/base/dtype.hpp>

#include <utility>

namespace bellows::checks {

/// The sums' error by the magnitudes of their terms, and one rounding to the result's storage.
inline auto product_bound(std::uint64_t terms, reference::Vector magnitudes, DType storage) {
    return reference::sum_bound(terms + 2, std::move(magnitudes),
                                storage == DType::BF16 ? 1.01 * reference::kBf16Epsilon
                                                       : reference::kF32Epsilon);
}

/// calc_diff() of a whole matrix.
inline double most_diff(DType storage) {
    return storage == DType::BF16 ? 1.5e-5 : 1e-9;
}

} // namespace bellows::checks
