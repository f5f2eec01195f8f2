// SPDX-License-Identifier: MIT
#pragma once

// How the fp8 kernels are started: the form that suits a device, constants and grids.

#include "operands.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>

namespace bellows::fp8 {

inline bool streams(const Recording& recording, Form form) {
    return form == Form::Device ? recording.device().info().is_cpu : form == Form::Streams;
}

constexpr std::uint32_t constant(Format format) {
    return format == Format::E4M3 ? 0 : 1;
}
constexpr std::uint32_t constant(ScaleRule rule) {
    return rule == ScaleRule::PowerOfTwo ? 0 : 1;
}

constexpr std::uint32_t clamp_groups(std::uint64_t groups) {
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(groups, 1, kMaxGroups));
}

} // namespace bellows::fp8
