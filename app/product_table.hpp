// SPDX-License-Identifier: MIT
#pragma once

// `bellows info --kernels`: measured products as a table.

#include <bellows/run/product_times.hpp>

#include <string>

namespace bellows {

/// Each product with its variants, what runs take and what would be fastest, in at most 100 columns
/// for up to three variants.
std::string format_product_times(const ProductTimes& times);

} // namespace bellows
