// SPDX-License-Identifier: MIT
#pragma once

// Values of parameters that all cores make at once, piece by piece.

#include <bellows/base/parallel.hpp>
#include <bellows/shape/parameters.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace bellows {

/// Rows of a parameter, and where their values go.
template <class T>
struct RowPiece {
    const ParameterInfo* info;
    std::uint64_t first_row;
    std::span<T> values;
};

/// Adds rows [first, first + count) in pieces that several threads can share. pitch: elements from
/// the beginning of a row to that of the next.
template <class T>
void add_pieces(std::vector<RowPiece<T>>& pieces, const ParameterInfo& info, std::uint64_t first,
                std::uint64_t count, std::uint64_t pitch, std::span<T> values) {
    constexpr std::uint64_t kPiece = std::uint64_t{1} << 20; // elements
    const std::uint64_t step = std::max<std::uint64_t>(kPiece / pitch, 1);
    for (std::uint64_t row = 0; row < count; row += step) {
        const std::uint64_t rows = std::min(step, count - row);
        pieces.push_back({&info, first + row, values.subspan(row * pitch, rows * pitch)});
    }
}

/// On all cores; the first error is thrown when all have ended.
template <class T>
void fill(const std::vector<RowPiece<T>>& pieces,
          const std::function<void(const ParameterInfo&, std::uint64_t, std::span<T>)>& source) {
    parallel_for(pieces.size(), [&](std::size_t i) {
        source(*pieces[i].info, pieces[i].first_row, pieces[i].values);
    });
}

} // namespace bellows
