// SPDX-License-Identifier: MIT
#pragma once

// Matrices of f16 as the registers that a subgroup loads them into. Which elements an invocation
// holds is the device's own affair, but where it always holds the same ones, and an equal share of
// them, a matrix can be saved and restored element by element: operands of which each invocation
// reads its part in one piece need no workgroup memory.

#include <bellows/engine/gemm_plan.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace bellows {

class Device;

/// "" when matrices A and B of `shape`, which the device enumerates with f16 and f32 sums, survive
/// being saved by one kernel and restored by another, else why not. The first call for a shape runs
/// the two kernels and waits for them; later ones remember. From any thread.
std::string why_no_matrix_images(const Device& device, const MatrixShape& shape);

/// Which elements an invocation holds, on devices where that is regular: per_k at a time ("slots")
/// are of one row of A, or one column of B, and of the same k in all slots of both operands. Four
/// bits of `order` for each of eight elements at most: slot * per_k + place in the slot. The
/// smallest k of an invocation's slots is a multiple of k_stride, and says which k the others are.
struct MatrixSlots {
    std::uint32_t per_k = 0, k_stride = 0;
    std::uint32_t order_a = 0, order_b = 0;
};
/// Nothing when why_no_matrix_images says so or it is not as described. As why_no_matrix_images.
std::optional<MatrixSlots> matrix_slots(const Device& device, const MatrixShape& shape);

} // namespace bellows
