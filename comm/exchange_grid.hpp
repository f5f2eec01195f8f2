// SPDX-License-Identifier: MIT
#pragma once

// Grids of the kernels that pack and unpack (shaders/include/rows.glsl). All of them stride, so any
// grid gives the same bits; how large it is decides only what the exchange takes from the compute
// that runs beside it.

#include <bellows/engine/recording.hpp>

#include <algorithm>
#include <cstdint>

namespace bellows {

struct ExchangeGrid {
    bool cpu = false;
    std::uint32_t workgroups = 0; ///< the caller's bound; 0: none

    std::uint32_t local_size() const noexcept { return cpu ? 8 : 64; }
    /// A workgroup per row on GPUs, an invocation per row on CPUs.
    std::uint32_t row_per_workgroup() const noexcept { return cpu ? 0 : 1; }
    /// Row by row on CPUs, which write better in order.
    std::uint32_t spread_by_source() const noexcept { return cpu ? 0 : 1; }
    Groups rows(std::uint64_t count) const noexcept {
        return bounded(cpu ? (count + local_size() - 1) / local_size() : count, cpu ? 64 : 16384);
    }
    /// For kernels with an invocation per item.
    Groups items(std::uint64_t count) const noexcept {
        return bounded((count + local_size() - 1) / local_size(), cpu ? 64 : 4096);
    }

private:
    Groups bounded(std::uint64_t wanted, std::uint64_t most) const noexcept {
        if (workgroups > 0)
            most = std::min<std::uint64_t>(most, workgroups);
        return {static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, most)), 1, 1};
    }
};

} // namespace bellows
