// SPDX-License-Identifier: MIT
#pragma once

// How the fp8 ops fill kernels' constants and grids. Pure functions.

#include "operands.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>

namespace bellows::fp8 {

inline bool streams(const Recording& recording, Form form) {
    return form == Form::Device ? recording.device().info().is_cpu : form == Form::Streams;
}

/// Whether to take the form for rows that do not fill a GPU. Each invocation then takes as little
/// as it can: kernels of which every instruction runs once wait for the fetching of their code.
inline bool is_few(const Recording& recording, Form form, std::uint64_t rows,
                   std::uint64_t columns) {
    constexpr std::uint64_t kMostElements = std::uint64_t{1} << 22;
    return form == Form::Device
               ? !recording.device().info().is_cpu && rows * columns <= kMostElements
               : form == Form::Few;
}

inline std::uint32_t constant(Format format) {
    return format == Format::E4M3 ? 0 : 1;
}
inline std::uint32_t constant(ScaleRule rule) {
    return rule == ScaleRule::PowerOfTwo ? 0 : 1;
}

/// Sizes of a grid whose workgroups take lanes_x eights of columns side by side.
struct LanePlan {
    std::uint32_t local_size = 8;
    std::uint32_t lanes_x = 8;

    std::uint32_t step_rows() const { return local_size / lanes_x; }
};

/// Of 16, 32, 64 and 128 lanes the number that leaves fewest idle, the largest of equals.
inline LanePlan plan_lanes(bool cpu, std::uint64_t eights) {
    if (cpu)
        return {};
    LanePlan plan{128, 16};
    std::uint64_t least = ~std::uint64_t{0};
    for (const std::uint32_t lanes : {128u, 64u, 32u, 16u}) {
        const std::uint64_t width = div_up(eights, lanes) * lanes;
        if (width < least) {
            least = width;
            plan.lanes_x = lanes;
        }
    }
    return plan;
}

inline std::uint32_t clamp_groups(std::uint64_t groups) {
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(groups, 1, kMaxGroups));
}

} // namespace bellows::fp8
