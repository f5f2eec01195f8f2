// SPDX-License-Identifier: MIT
#pragma once

// Products of few rows with E4M3 weights on matrix units (shaders/fp8_few_gemm.comp): one dispatch
// without workspace, from wherever a layout says which rows are whose; no work list.

#include "tiles.hpp"

#include <string>
#include <vector>

namespace bellows::fp8 {

/// "" when `product`, which Variant::Streamed serves in f32 arithmetic, can be computed so, else
/// what is against it.
std::string why_not_few_rows(const Device& device, const Product& product, const Tile& tile = {});
/// Its numeric class then.
std::string few_rows_class(const Device& device, const Product& product);
/// tiles_of; why_not_few_rows of the product is "".
std::vector<NamedTile> few_rows_tiles(const Device& device, const Product& product);
/// why_not_few_rows of the product in the tile is "".
void record_few_rows(Recording& recording, const char* op, const Product& product,
                     const Tile& tile);

} // namespace bellows::fp8
