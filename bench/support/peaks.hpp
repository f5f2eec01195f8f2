// SPDX-License-Identifier: MIT
#pragma once

// What a device's units give in loops that stay in registers, in GFLOPS: the ceilings beside which
// products are shown. Each loop's result is checked.

#include <bellows/engine/device.hpp>

namespace bellows::bench {

/// f32 fused multiply-adds, two operations each.
double fma_peak(Device& device);
/// Matrix units of the device's numeric class; 0 without.
double matrix_peak(Device& device);

} // namespace bellows::bench
