// SPDX-License-Identifier: MIT
#pragma once

// Grids of the kernels that pack and unpack (shaders/include/rows.glsl). All of them stride, so any
// grid gives the same bits; how large it is decides only what the exchange takes from the compute
// that runs beside it.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/spread_plan.hpp>

#include <algorithm>
#include <cstdint>

namespace bellows {

struct ExchangeGrid {
    bool cpu = false;
    std::uint32_t workgroups = 0; ///< the caller's bound; 0: none

    std::uint32_t local_size() const noexcept { return cpu ? 8 : 64; }
    /// For kernels with a workgroup per row.
    Groups rows(std::uint64_t count) const noexcept { return bounded(count, cpu ? 64 : 16384); }
    /// Of a row that kernels spread.
    SpreadPlan spread(std::uint64_t units) const noexcept {
        return cpu || workgroups > 0 ? SpreadPlan{4, 1, 8} : plan_spread(units, local_size());
    }
    /// For kernels that spread `count` rows.
    Groups sources(std::uint64_t count, std::uint64_t units) const noexcept {
        Groups groups = rows(count);
        groups.y = spread(units).parts;
        return groups;
    }
    /// The same where besides an invocation looks at each of `rows` rows, for those that none of
    /// the `records` is for.
    Groups gathers(std::uint64_t records, std::uint64_t rows, std::uint64_t units) const noexcept {
        return sources(records + per_invocation(rows), units);
    }
    /// For kernels with a workgroup per `group`, which its invocations share.
    std::uint32_t shared_size() const noexcept { return cpu ? 8 : 256; }
    Groups shared(std::uint64_t groups) const noexcept { return bounded(groups, cpu ? 64 : 4096); }
    /// For kernels with an invocation per item.
    Groups items(std::uint64_t count) const noexcept {
        return bounded(per_invocation(count), cpu ? 64 : 4096);
    }

private:
    std::uint64_t per_invocation(std::uint64_t count) const noexcept {
        return (count + local_size() - 1) / local_size();
    }
    Groups bounded(std::uint64_t wanted, std::uint64_t most) const noexcept {
        if (workgroups > 0)
            most = std::min<std::uint64_t>(most, workgroups);
        return {static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 1, most)), 1, 1};
    }
};

} // namespace bellows
