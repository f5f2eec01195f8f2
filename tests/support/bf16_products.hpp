// SPDX-License-Identifier: MIT
#pragma once

// The ways of bf16 linear layers in tests: Direct on CPUs too, which do not take it by themselves.

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/fp8/choice.hpp>

#include <gtest/gtest.h>

#include <optional>

namespace bellows::testing {

enum class Bf16Products : std::uint8_t { Engine, Usual, Direct };

/// All products Direct; in a small tile on CPUs. The device's class of products becomes one on
/// matrix units of shaders, if it is another. Nothing where the device has no such units.
inline std::optional<fp8::Choice> direct_choice(Device& device) {
    if (gemm_class(device).units == GemmClass::Units::None || gemm_class(device).native)
        for (const GemmClass& c : gemm_classes(device))
            if (c.units != GemmClass::Units::None && !c.native && c.why_not.empty())
                use_gemm_class(device, c.name);
    const GemmClass& c = gemm_class(device);
    if (c.units == GemmClass::Units::None) {
        EXPECT_NE(fp8::why_not(device, fp8::Variant::Direct), "");
        return std::nullopt;
    }
    fp8::Way way = fp8::Variant::Direct;
    if (device.info().is_cpu)
        way.tile = {.fragments_m = 1,
                    .fragments_n = 2,
                    .warps_m = 2,
                    .warps_n = 2,
                    .step_k = 8 * c.shape.k / matrix_slots(device, c.shape, c.units).value().per_k,
                    .stages = 3};
    return fp8::of_bf16(way);
}

/// Direct: where the device can.
inline fp8::Choice choice_of(Device& device, Bf16Products products) {
    const fp8::Choice engine(fp8::Variant::Decoded);
    switch (products) {
    case Bf16Products::Engine:
        break;
    case Bf16Products::Usual:
        return fp8::usual_choice_of_bf16(device);
    case Bf16Products::Direct:
        return direct_choice(device).value_or(engine);
    }
    return engine;
}

} // namespace bellows::testing
