// SPDX-License-Identifier: MIT
#pragma once

// A product whose operands have been found to fit together: what gemm.cpp checks and the ways of
// computing it take.

#include "operands.hpp"

#include <bellows/fp8/gemm.hpp>

#include <algorithm>

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

/// Groups of so many rows are few: they are for kernels that stream weights.
constexpr std::uint64_t kFewRows = 64;

/// Rows of a group on average, as far as the host can tell.
inline std::uint64_t expected_rows(const Product& p) {
    const Extents d = extents_of(p.d);
    if (p.rows == nullptr)
        return d.rows;
    const GroupLayout& layout = p.rows->layout;
    if (layout.expected_rows != 0)
        return layout.expected_rows;
    if (layout.form == GroupLayout::Form::Masked) // made for decoding
        return std::min(layout.spacing, kFewRows);
    return div_up(d.rows, std::max<std::uint64_t>(layout.groups, 1));
}

} // namespace bellows::fp8
