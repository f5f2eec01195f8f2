// SPDX-License-Identifier: MIT
#pragma once

// What a device remembers of how it computes products: the class that was chosen and its tiles.

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>

#include <array>
#include <string_view>
#include <vector>

namespace bellows::detail {

struct GemmChoice {
    GemmClass gemm_class;
    std::array<std::vector<GemmTile>, 3> tiles; ///< by GemmForm; empty without matrix units
    std::array<GemmTile, 3> group_tile;         ///< of grouped products; NT's and NN's cover alike

    const std::vector<GemmTile>& of(GemmForm form) const {
        return tiles[static_cast<std::size_t>(form)];
    }
    const GemmTile& grouped(GemmForm form) const {
        return group_tile[static_cast<std::size_t>(form)];
    }
};

/// A tile as the constants of a kernel on matrix units.
template <class Constants>
void set_tile(Constants& constants, const GemmTile& tile, const DeviceInfo& info) {
    constants.local_size = tile.local_size(info);
    constants.mma_m = tile.shape.m;
    constants.mma_n = tile.shape.n;
    constants.mma_k = tile.shape.k;
    constants.fragments_m = tile.fragments_m;
    constants.fragments_n = tile.fragments_n;
    constants.warps_m = tile.warps_m;
    constants.warps_n = tile.warps_n;
    constants.block_k = tile.block_k;
    constants.stages = tile.stages;
    constants.turn = tile.turn;
}

/// Sets impl.gemm; name "" for what the device takes by itself. Throws as use_gemm_class.
void choose_gemm_class(Device::Impl& impl, std::string_view name);

} // namespace bellows::detail
