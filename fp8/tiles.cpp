// SPDX-License-Identifier: MIT
#include "tiles.hpp"

#include "direct.hpp"
#include "packed.hpp"
#include "product_case.hpp"
#include "streamed.hpp"

#include <algorithm>
#include <utility>

namespace bellows::fp8 {

void TileList::add(const Tile& tile, std::string name) {
    const bool known = std::any_of(tiles_.begin(), tiles_.end(), [&](const NamedTile& other) {
        return other.tile == tile || other.name == name;
    });
    if (!known && tiles_.size() < kMost)
        tiles_.push_back({tile, std::move(name)});
}

bool fits_workgroup(const DeviceInfo& info, std::uint64_t subgroups) {
    return subgroups <= info.max_workgroup_subgroups &&
           subgroups * info.subgroup_size <= info.max_workgroup_invocations;
}

std::string name_of(const Tile& tile, std::uint64_t rows, std::uint64_t columns) {
    return std::to_string(rows) + "x" + std::to_string(columns) +
           (tile.step_k != 0 ? "x" + std::to_string(tile.step_k) : "") +
           (tile.warps_k > 1 ? " in " + std::to_string(tile.warps_k) : "") +
           (tile.ahead > 1 ? ", " + std::to_string(tile.ahead) + " ahead" : "");
}

std::vector<NamedTile> tiles_of(const Device& device, const Product& p, Variant variant) {
    if (variant == Variant::Packed && why_not_packed(device, p).empty())
        return packed_tiles(device, p);
    if (variant == Variant::Streamed && why_not_streamed(device, p).empty())
        return streamed_tiles(device, p);
    if (variant == Variant::Direct && why_not_direct(device, p).empty())
        return direct_tiles(device, p);
    return {};
}

bool contains(const std::vector<NamedTile>& tiles, const Tile& tile) {
    return std::any_of(tiles.begin(), tiles.end(),
                       [&](const NamedTile& other) { return other.tile == tile; });
}

std::vector<NamedTile> tiles(const Device& device, Variant variant, GemmForm form, const Operand& a,
                             const Operand& b, const TensorView& d, const GroupedRows* rows) {
    return tiles_of(device, product_of(form, a, b, d, rows), variant);
}

} // namespace bellows::fp8
