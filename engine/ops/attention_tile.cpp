// SPDX-License-Identifier: MIT
#include "attention_tile.hpp"

#include "runtime/device_impl.hpp"

#include <algorithm>
#include <atomic>

namespace bellows::ops {

std::uint64_t AttentionTile::shared_bytes(std::uint64_t qk_dim, std::uint64_t v_dim) const {
    // In words of 16 bytes: eight elements of a matrix, or four floats.
    const std::uint64_t x = (qk_dim + 8) / 8, y = (v_dim + 8) / 8;
    const std::uint64_t scores = shape.m * ((kBlock + 4) / 4), weights = shape.m * (kBlock + 8) / 8;
    const std::uint64_t scratch = in_lane ? 0 : warps * (2 * scores + weights);
    const std::uint64_t blocks = kBlock * (x + y) + kBlock / 2 + scratch;
    constexpr std::uint32_t kTurn = 4; // the kernel's TURN
    const std::uint64_t first_rows = shape.m * std::min(warps, kTurn) * std::max(x, y);
    const std::uint64_t results = std::uint64_t{warps} * (shape.m * shape.n / 4);
    return 16 * std::max({blocks, first_rows, results});
}

std::optional<AttentionTile> attention_tile(const DeviceInfo& info, const GemmClass& gemm_class,
                                            std::uint64_t qk_dim, std::uint64_t v_dim,
                                            std::uint64_t seq,
                                            const std::optional<MatrixSlots>& slots) {
    if (gemm_class.units == GemmClass::Units::None)
        return std::nullopt;
    // A CPU driver compiles each product of a tile to code of its own: larger heads take minutes.
    constexpr std::uint64_t kMostOnCpu = 24;
    if (info.is_cpu && qk_dim + v_dim > kMostOnCpu)
        return std::nullopt;
    AttentionTile tile{.shape = gemm_class.shape};
    const auto [m, n, k] = tile.shape;
    if (slots && slots->like_a && m * k % (2 * info.subgroup_size) == 0) {
        tile.in_lane = slots;
        tile.warps = 8; // which share what is staged; with scratch for each there is seldom room
    }
    for (const std::uint64_t size : {qk_dim, v_dim})
        if (size % n != 0 || size % k != 0)
            return std::nullopt;
    // As many lanes as there are to a row compute its weights, each eight at once.
    constexpr std::uint32_t kBlock = AttentionTile::kBlock;
    const bool shared_out =
        info.subgroup_size % m == 0 && kBlock % (8 * (info.subgroup_size / m)) == 0;
    if (!shared_out || kBlock % n != 0 || kBlock % k != 0)
        return std::nullopt;
    while (tile.warps > 1 && tile.rows() / 2 >= seq)
        tile.warps /= 2;
    // lavapipe takes a subgroup's barrier for the workgroup's, and subgroups without a block have
    // none: so all of them have the same blocks.
    while (info.is_cpu && !tile.in_lane && tile.warps > 1 && tile.rows() > kBlock)
        tile.warps /= 2;
    for (; tile.warps > 0; tile.warps /= 2)
        if (tile.shared_bytes(qk_dim, v_dim) <= info.shared_memory_bytes &&
            tile.local_size(info) <= info.max_workgroup_invocations)
            return tile;
    return std::nullopt;
}

namespace {

struct ThroughMemory {
    std::atomic<bool> wanted{false};
};

} // namespace

void pass_weights_through_memory(Device& device, bool through) {
    device.impl().memory_of<ThroughMemory>().wanted = through;
}
bool passes_weights_through_memory(const Device& device) {
    return device.impl().memory_of<ThroughMemory>().wanted;
}

} // namespace bellows::ops
