// SPDX-License-Identifier: MIT
#pragma once

// The tiles in which a variant computes a product well. Each gives the same bits, so that which one
// is taken may differ from device to device and from run to run. Plain values.

#include <bellows/fp8/gemm.hpp>

#include <string>
#include <vector>

namespace bellows::fp8 {

/// "64x128 in 2, 4 ahead": rows by columns of D, by the k of a step where that can differ; "in 2"
/// sums in two parts, and loads run 4 steps ahead instead of one. Of Direct also subgroups and
/// stages: "256x128x32, 4x2 subgroups, 3 stages".
struct NamedTile {
    Tile tile;
    std::string name;
};

/// The tile that the variant takes by itself, which suits an H200, then up to kMostOtherTiles
/// others that may suit this device better; none when the variant has no tiles for the product.
/// Arguments as those of gemm.hpp's products; none needs memory yet.
std::vector<NamedTile> tiles(const Device& device, Variant variant, GemmForm form, const Operand& a,
                             const Operand& b, const TensorView& d,
                             const GroupedRows* rows = nullptr);
inline constexpr std::size_t kMostOtherTiles = 8;

} // namespace bellows::fp8
