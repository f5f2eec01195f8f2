// SPDX-License-Identifier: MIT
#pragma once

// Products of some rows with E4M3 weights that are streamed to matrix units of f16: one dispatch
// without workspace, from wherever a layout says which rows are whose; no work list. Of few rows
// each subgroup reads A by itself (shaders/fp8_few_gemm.comp); more of them pass workgroup memory
// (shaders/fp8_stream_gemm.comp).

#include "tiles.hpp"

#include <string>
#include <vector>

namespace bellows::fp8 {

/// "" when `product`, which Variant::Streamed serves in f32 arithmetic, can be computed so, else
/// what is against it.
std::string why_not_stream_units(const Device& device, const Product& product,
                                 const Tile& tile = {});
/// Its numeric class then.
std::string stream_units_class(const Device& device, const Product& product);
/// tiles_of; why_not_stream_units of the product is "".
std::vector<NamedTile> stream_units_tiles(const Device& device, const Product& product);
/// why_not_stream_units of the product in the tile is "".
void record_stream_units(Recording& recording, const char* op, const Product& product,
                         const Tile& tile);

} // namespace bellows::fp8
