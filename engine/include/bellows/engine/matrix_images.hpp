// SPDX-License-Identifier: MIT
#pragma once

// Matrices of f16 as the registers that a subgroup loads them into. Which elements an invocation
// holds is the device's own affair, but where it always holds the same ones, and an equal share of
// them, a matrix can be saved and restored element by element: operands of which each invocation
// reads its part in one piece need no workgroup memory.

#include <bellows/engine/gemm_plan.hpp>

#include <string>

namespace bellows {

class Device;

/// "" when matrices A and B of `shape`, which the device enumerates with f16 and f32 sums, survive
/// being saved by one kernel and restored by another, else why not. The first call for a shape runs
/// the two kernels and waits for them; later ones remember. From any thread.
std::string why_no_matrix_images(const Device& device, const MatrixShape& shape);

} // namespace bellows
