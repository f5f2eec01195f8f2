// SPDX-License-Identifier: MIT
#pragma once

// Products of two bf16 tensors on matrix units (nt): those of A go straight from memory to the
// registers of matrices, those of B through workgroup memory in the order in which they are read.
// One dispatch, no workspace.

#include "tiles.hpp"

#include <string>
#include <vector>

namespace bellows::fp8 {

/// "" when the device can compute any product so, else what it lacks.
std::string why_not_direct(const Device& device, const Tile& tile = {});
/// "" when `product` can be computed so, else what is against it.
std::string why_not_direct(const Device& device, const Product& product, const Tile& tile = {});
/// Whether it beats the engine's products: many rows, on a GPU with units of bf16, whose range is
/// all of bf16's. why_not_direct of the product is "".
bool better_direct(const Device& device, const Product& product);
/// The numeric class of products computed so: "direct-bf16-k16", after the elements and the depth
/// of a matrix product. As coopmat-bf16-k16 (gemm_plan.hpp), but k goes another way in each 64.
std::string direct_class(const Device& device);
/// why_not_direct of the product in the tile is "".
void record_direct(Recording& recording, const char* op, const Product& product, const Tile& tile);
/// tiles_of; why_not_direct of the product is "".
std::vector<NamedTile> direct_tiles(const Device& device, const Product& product);

} // namespace bellows::fp8
