// SPDX-License-Identifier: MIT
#pragma once

// Matrices as the registers that a subgroup loads them into. Which elements an invocation
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

/// Where an invocation holds the same places of a sum as of a matrix A. Four bits for each element:
/// of a sum the slot of A that its row is; of A the sum's in its place.
struct SumLikeA {
    std::uint32_t row = 0, sum_of_a = 0;
};

/// Which elements an invocation holds, on devices where that is regular and matrices that are set
/// element by element have them: per_k of A at a time ("slots") are of one row, or of B of one
/// column, and of the same k in all slots of both operands. Four bits of these words each say
///   place  of an element: slot * per_k + place in the slot
///   slot   of a slot: its row or column in invocation 0
///   lane   of a bit of the invocation's number: what it adds to those
///   chunk  of a bit of the invocation's number: what it adds to the number, in the order of their
///          smallest k, of the set of k that the slots have
/// Of a sum's elements that are the columns: sum_slots of them, to which `place` and `slot` refer.
/// Where an invocation holds the same places of a sum as of A, like_a says more.
struct MatrixSlots {
    struct Operand {
        std::uint32_t place = 0, slot = 0, lane = 0, chunk = 0;
    };
    std::uint32_t per_k = 0;
    Operand a, b, sum;
    std::uint32_t sum_slots = 0;
    std::optional<SumLikeA> like_a;
};
/// Of matrices of f16 or bf16; nothing when it is not as described. `shape` and the first call: as
/// why_no_matrix_images.
std::optional<MatrixSlots> matrix_slots(const Device& device, const MatrixShape& shape,
                                        GemmClass::Units units = GemmClass::Units::F16);

} // namespace bellows
