// SPDX-License-Identifier: MIT
#pragma once

// What a device's matrix units do at most, to which a training's speed is compared. The thread that
// records.

#include <bellows/engine/device.hpp>

#include <string>

namespace bellows {

struct MatrixPeak {
    double flops_per_s = 0; ///< 0: not measured
    std::string what;       ///< what reached it, for a report
};

/// Measures for about half a second: products of the units on registers alone (f32
/// multiply-additions where the device has no such units), and one large bf16 product as the engine
/// computes it, which reaches more where units of whole workgroups do it. The higher rate counts.
/// On CPU drivers nothing is measured. The work stands in the device's trace.
MatrixPeak measure_matrix_peak(Device& device);

} // namespace bellows
