// SPDX-License-Identifier: MIT
#pragma once

// A product whose operands have been found to fit together: what gemm.cpp checks and the ways of
// computing it take.

#include "operands.hpp"

#include <bellows/fp8/gemm.hpp>

#include <algorithm>
#include <string>

namespace bellows::fp8 {

struct Product {
    GemmForm form;
    Operand a, b;
    TensorView d;
    const GroupedRows* rows; ///< null: dense
    bool accumulate;
};

struct Extents {
    std::uint64_t batch = 1, rows = 0, columns = 0;
};

inline Extents extents_of(const TensorView& view) {
    return {view.rank == 3 ? view.extent[0] : 1, view.extent[view.rank - 2],
            view.extent[view.rank - 1]};
}

/// Whether every group has a block of its own.
inline bool masked(const Product& p) {
    return p.rows != nullptr && p.rows->layout.form == GroupLayout::Form::Masked;
}

/// Of a group, on average, is "few".
inline constexpr std::uint64_t kFewRows = 64;

/// Rows of a group of activations on average, as far as the host can tell.
inline std::uint64_t expected_rows(const GroupLayout& layout) {
    if (layout.expected_rows != 0)
        return layout.expected_rows;
    if (layout.form == GroupLayout::Form::Masked) // made for decoding
        return std::min(layout.spacing, kFewRows);
    const std::uint64_t groups = std::max<std::uint64_t>(layout.groups, 1);
    return (layout.rows + groups - 1) / groups;
}
inline std::uint64_t expected_rows(const Product& p) {
    return p.rows == nullptr ? extents_of(p.a.values).rows : expected_rows(p.rows->layout);
}

/// "" when the product can be computed so, else what is against it.
std::string why_not(const Device& device, const Product& product, const Way& way);
/// What Variant::Device takes.
Variant usual_variant(const Device& device, const Product& product);
/// Two variants of the same class give the same bits.
std::string numeric_class(const Device& device, const Product& product, Variant variant);

} // namespace bellows::fp8
