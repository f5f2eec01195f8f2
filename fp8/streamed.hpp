// SPDX-License-Identifier: MIT
#pragma once

// Products of few rows with E4M3 weights that are read once, as they stand in memory: one dispatch,
// no workspace. On matrix units of f16 for E4M3 activations with power-of-two scales
// (stream_units.hpp); and in f32 arithmetic ("f32-sequential", what decoding ahead gives too) for
// those, bf16 and f32.

#include "tiles.hpp"

#include <string>
#include <vector>

namespace bellows::fp8 {

/// "" when `product` can be computed so, else what is against it.
std::string why_not_streamed(const Device& device, const Product& product, const Tile& tile = {});
/// The numeric class of `product` computed so: on matrix units "streamed-in-4-f16-k16", after the
/// parts in which k is summed (left out: in one, A through workgroup memory) and the depth of a
/// matrix product, or "f32-sequential".
std::string streamed_class(const Device& device, const Product& product);
/// Whether no work list is read.
bool streamed_reads_layout(const Device& device, const Product& product, const Tile& tile = {});
/// Whether it is also the faster way.
bool better_streamed(const Device& device, const Product& product);
/// tiles_of; why_not_streamed of the product is "". None in f32 arithmetic.
std::vector<NamedTile> streamed_tiles(const Device& device, const Product& product);
/// why_not_streamed of the product in the tile is "".
void record_streamed(Recording& recording, const char* op, const Product& product,
                     const Tile& tile);

} // namespace bellows::fp8
