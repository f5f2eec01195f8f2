// SPDX-License-Identifier: MIT
#pragma once

// Lists of the tiles that a product can take, as packed.cpp, stream_units.cpp and direct.cpp
// make them.

#include "product.hpp"

#include <bellows/fp8/tiles.hpp>

#include <string>
#include <utility>
#include <vector>

namespace bellows::fp8 {

/// tiles() of a product; none where the variant cannot compute it.
std::vector<NamedTile> tiles_of(const Device& device, const Product& product, Variant variant);
bool contains(const std::vector<NamedTile>& tiles, const Tile& tile);

/// Why a variant does not serve in a tile that its kernels cannot run.
inline constexpr const char* kNoSuchTile = "the tile is none that its kernels can run here";

/// Whether a workgroup can have so many subgroups.
bool fits_workgroup(const DeviceInfo& info, std::uint64_t subgroups);

/// What NamedTile says of a tile of so many elements of D.
std::string name_of(const Tile& tile, std::uint64_t rows, std::uint64_t columns);

/// Tiles and names without repetition, up to as many as are worth timing.
class TileList {
public:
    TileList(const Tile& usual, std::string name) : tiles_{{usual, std::move(name)}} {}

    void add(const Tile& tile, std::string name);
    std::vector<NamedTile> take() { return std::move(tiles_); }

private:
    static constexpr std::size_t kMost = 6;
    std::vector<NamedTile> tiles_;
};

/// 32-bit registers of an invocation that a kernel can spend on matrices.
inline constexpr std::uint64_t kMostRegisters = 224;

} // namespace bellows::fp8
