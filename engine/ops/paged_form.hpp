// SPDX-License-Identifier: MIT
#pragma once

// Which of its two kernels attention over a paged cache takes, and in what shape.

#include <bellows/engine/paged_attention.hpp>

#include <cstdint>
#include <optional>

namespace bellows {
class Device;
}

namespace bellows::ops {

/// A workgroup that shares what it reads of the cache (shaders/paged_attention.comp).
struct PagedTile {
    std::uint32_t local_size = 128;
    std::uint32_t pairs = 16, tile = 8, columns = 32;
};

/// Of entries with that many fours at once and values of value4; nothing where an invocation to
/// each row and head does better, or is all that the device can run.
std::optional<PagedTile> paged_tile(const Device& device, std::uint64_t entry4,
                                    std::uint64_t value4);

/// For tests: what GPUs take on a CPU driver, too.
void share_paged_entries(Device& device, bool share);

} // namespace bellows::ops
